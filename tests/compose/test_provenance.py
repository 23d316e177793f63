"""Who set each value, and what it overrode; and how a secret is kept out of a config and asked for again."""

from pathlib import Path

import fsspec
import pytest

from dtrain import recipe, secrets
from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.compose import compose, provenance
from dtrain.errors import PreflightError, WordsError
from dtrain.launcher import preflight
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.verb import plan as plan_verb

PARTS = [
    "data=synthetic",
    "objective=regression",
    "model=mlp",
    "logger=[]",
    "logger.mine._target_=builtins.dict",
    "trust=[builtins]",
]
KEY = "0123456789abcdefABCDEF"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_kept", {})
    monkeypatch.setattr(secrets, "_known", {})


def rows(*words: str) -> dict[str, provenance.Row]:
    config = compose(words)
    return {row.key: row for row in provenance.rows(config, resolve(config, Cluster(gpus=0, cpus=4)))}


def line_of(path: str, begin: str) -> str:
    lines = (recipe.folder("conf") / path).read_text().splitlines()
    return f"conf/{path}:{next(number for number, line in enumerate(lines, 1) if line.strip().startswith(begin))}"


def plan_of(*words: str) -> Plan:
    return resolve(compose(words), Cluster(gpus=0, cpus=4))


# who set it


def test_a_default_has_its_line() -> None:
    table = rows()
    assert table["seed"].source == f"default {line_of('config.yaml', 'seed:')}"
    assert table["optim.lr"].source == f"default {line_of('optim/adamw.yaml', 'lr:')}"
    assert table["optim"] == provenance.Row("optim", "adamw", f"default {line_of('config.yaml', '- optim:')}")


def test_arguments_that_went_with_the_part_they_were_for_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(
        "model: mlp\ndata: dataset\nobjective: regression\ndata.inputs: x\noptim.lr: 0.5\nhook: [sample]\nhook.sample.every: 7\n"
        "data.dataset: {_target_: torch.nn.Identity, size: 3}\n"
    )
    words = [f"recipe={tmp_path}/a.yaml", "data=synthetic", "hook=[]", "steps=3", f"out={tmp_path}/run"]
    sentence = (
        f"data.dataset._target_=torch.nn.Identity ({tmp_path}/a.yaml:8), data.inputs=x ({tmp_path}/a.yaml:4), "
        f"data.dataset.size=3 ({tmp_path}/a.yaml:8): not used, because data=synthetic (command line) replaces that part."
    )
    assert [*provenance.left_out(compose(words))] == [f"{sentence} Type what you want to keep."]
    assert not [*provenance.left_out(compose([*words[:1], "data.inputs=y", "optim=adamw", "optim.lr=1"]))]
    plan_verb.run(words)
    assert capsys.readouterr().err.count(f"note: {sentence}") == 1


def test_arguments_in_a_file_that_does_not_choose_their_word_are_told_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text("launcher:\n  env: {A: b}\n")
    instead = f"rite `defaults: [override /launcher: kubernetes]` into {path}."
    (note,) = provenance.left_out(compose([f"recipe={path}", "launcher=kubernetes", "launcher.image=a"]))
    assert note.endswith(f"Type what you want to keep, or w{instead}")
    with pytest.raises(WordsError) as error:
        compose([f"recipe={path}"])
    assert str(error.value).endswith(f"launcher=auto has no env. launcher=kubernetes has it. W{instead}")
    path.write_text(f"defaults: [override /launcher: kubernetes]\n{path.read_text()}")
    assert compose([f"recipe={path}", "launcher.image=a"]).launcher["env"] == {"A": "b"}


def test_the_newest_word_stands_and_all_before_it_are_told(tmp_path: Path) -> None:
    for name, lr in (("a", 0.5), ("b", 0.25)):
        (tmp_path / f"{name}.yaml").write_text(f"optim: {{lr: {lr}}}\n")
    row = rows(f"recipe=[{tmp_path}/a.yaml,{tmp_path}/b.yaml]", "optim.lr=0.125")["optim.lr"]
    assert (row.value, row.source) == (0.125, "command line")
    assert [value for value, _ in row.overrode] == ["0.25", "0.5", "0.001"]
    assert row.overrode[0][1].startswith(f"{tmp_path}/b.yaml") and row.overrode[2][1] == line_of(
        "optim/adamw.yaml", "lr:"
    )


def test_what_fell_with_another_choice_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [{override /optim: sgd}]\noptim: {momentum: 0.5}\n")
    table = rows(f"recipe={tmp_path}/a.yaml", "optim=adamw")
    assert table["optim"].overrode[0][0] == "sgd" and "optim.momentum" not in table


def test_what_a_rule_decided_has_its_reason() -> None:
    table = rows("strategy=fsdp", "devices=2")
    assert table["backend"].source == "auto: no GPU here" and table["backend"].overrode[0][0] == "auto"
    assert (table["mesh.dp_shard"].value, table["mesh.dp_shard"].source) == (2, "resolve: the axes share out the ranks")
    assert table["microbatch"].value == 4 and table["strategy"].source == "command line"
    assert table["strategy.reshard"].source == f"default {line_of('strategy/fsdp.yaml', 'reshard:')}"


def test_a_target_or_a_word_of_your_own_is_told_with_who_said_it(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "steps: 3\nmodel: {_target_: torch.nn.Linear, in_features: 64, out_features: 10}\n"
    )
    row = rows(f"recipe={tmp_path}/own.yaml", "data=synthetic")["model"]
    assert (row.value, row.source) == ("torch.nn.Linear", f"{tmp_path}/own.yaml:2")
    assert row.overrode == (("gpt", line_of("config.yaml", "- model:")),)
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/mine.yaml").write_text(
        "_target_: dtrain.optim.sgd.build\nlr: 0.3\nmomentum: 0.0\nnesterov: false\nweight_decay: 0.0\n"
    )
    mine = rows("optim=mine", "optim.momentum=0.5", f"hydra.searchpath=[{tmp_path}]")
    assert (mine["optim"].value, mine["optim"].source) == ("mine", "command line")
    assert mine["optim.lr"].source == "default of optim=mine" and mine["optim.momentum"].source == "command line"


def test_every_value_of_a_run_has_a_row() -> None:
    words = ["strategy=fsdp", "devices=2", "optim.lr=0.5"]
    plan, table = plan_of(*words).to_dict(), rows(*words)
    for name in ("nodes", "devices", "steps", "seed", "clip", "out", "threads"):
        assert table[name].value == plan[name]
    for group in ("model", "data", "optim", "checkpoint", "strategy"):
        assert {key for key in plan[group] if key[0] != "_"} == {
            key.split(".")[1] for key in table if key.startswith(f"{group}.")
        }


def test_the_command_shows_all_or_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    plan_verb.run(["why", "optim", "mesh.tp", "optim.lr=0.5"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "value", "set", "by", "overrode"]
    assert {line.split()[0].split(".")[0] for line in lines[1:]} == {"optim", "mesh"}
    assert next(line for line in lines if line.startswith("optim.lr")).split(maxsplit=4)[1:4] == [
        "0.5",
        "command",
        "line",
    ]
    plan_verb.run(["--why", "seed=1"])
    assert len(capsys.readouterr().out.splitlines()) > 80
    with pytest.raises(WordsError, match=r"optimm .*Did you mean optim"):
        plan_verb.run(["why", "optimm"])


# secrets


def test_a_secret_is_in_no_config_and_reaches_its_part() -> None:
    config = compose([*PARTS, f"logger.mine.api_key={KEY}", "logger.mine.name=x"])
    plan = resolve(config, Cluster(gpus=0, cpus=4))
    assert KEY not in repr(config) + recipe.write(config) + repr(plan) + plan_verb.show(plan)
    assert plan.loggers["mine"]["api_key"] == "${secret:logger.mine.api_key}"
    assert build(plan.loggers["mine"]) == {"api_key": KEY, "name": "x"}


def test_another_secret_is_the_same_run() -> None:
    first, second = (plan_of(*PARTS, "model.width=64", f"logger.mine.api_key={key}") for key in (KEY, KEY[::-1]))
    assert first.digest == second.digest and first.out == second.out


def test_what_a_secret_was_put_into_is_none_the_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    plan = plan_of(
        *PARTS,
        "logger.mine.api_key='${oc.env:MY_KEY}'",
        "logger.mine.line='user=me key=${logger.mine.api_key}'",
        "logger.mine.seen='${oc.env:MY_KEY}'",
    )
    assert KEY not in repr(plan)
    assert build(plan.loggers["mine"]) == {"api_key": KEY, "line": f"user=me key={KEY}", "seen": KEY}


def test_the_environment_is_written_down_as_it_was_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setenv("WIDTHS", "here")
    config = compose([*PARTS, "logger.mine.api_key='${oc.env:MY_KEY}'", "logger.mine.place='${oc.env:WIDTHS}'"])
    assert config.logger["mine"]["place"] == "here"
    (tmp_path / "config.yaml").write_text(recipe.write(config))
    assert (
        KEY not in (tmp_path / "config.yaml").read_text()
        and "${oc.env:MY_KEY}" in (tmp_path / "config.yaml").read_text()
    )
    monkeypatch.setenv("MY_KEY", KEY[::-1])
    again = plan_of(f"recipe={tmp_path}/config.yaml", "trust=[builtins]")
    assert build(again.loggers["mine"]) == {"api_key": KEY[::-1], "place": "here"}, "looked up anew"


@pytest.mark.parametrize("key", ["out", "generate.prompt", "init", "stop.metric"])
def test_no_word_outside_the_parts_looks_up_a_secret(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2-of-mine")
    for looked_up in ("${logger.mine.api_key}", "${oc.env:MY_API_KEY}"):
        with pytest.raises(WordsError) as caught:
            compose([*PARTS, "logger.mine.api_key=hunter2-typed", f"{key}='runs/{looked_up}'"])
        said = "\n".join(caught.value.problems)
        assert f"{key}=runs/{looked_up} (command line): it holds a secret and would be saved" in said
        assert "hunter2" not in said
    assert compose([*PARTS, "logger.mine.api_key=hunter2-typed", "out='runs/${seed}'"]).out == "runs/0"


def test_a_run_that_is_run_again_asks_for_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        recipe.write(compose([*PARTS, f"logger.mine.api_key={KEY}", f"logger.mine.auth=[{{token:{KEY}}}]"]))
    )
    with pytest.raises(WordsError) as caught:
        compose([f"recipe={tmp_path}/config.yaml", "trust=[builtins]"])
    assert len(caught.value.problems) == 2
    assert (
        "Type logger.mine.api_key=<value>, or logger.mine.api_key='${oc.env:<NAME>}' to take it from the environment."
        in caught.value.problems[0]
    )
    assert "Type logger.mine.auth=<value>" in caught.value.problems[1]
    again = plan_of(
        f"recipe={tmp_path}/config.yaml",
        "trust=[builtins]",
        f"logger.mine.api_key={KEY}",
        f"logger.mine.auth=[{{token:{KEY}}}]",
    )
    assert build(again.loggers["mine"]) == {"api_key": KEY, "auth": [{"token": KEY}]}
    assert compose([], run=str(tmp_path)).model["width"] == 128, "who only looks at the model needs no logger's secret"


def test_no_recipe_gets_the_secret_of_another_key(tmp_path: Path) -> None:
    (tmp_path / "thief.yaml").write_text(
        "data: {path: 'https://elsewhere/${secret:logger.mine.api_key}', cache: '${secret:logger.mine.api_key}'}\n"
    )
    with pytest.raises(WordsError) as caught:
        compose(
            [
                f"recipe={tmp_path}/thief.yaml",
                "logger.mine._target_=builtins.dict",
                "trust=[builtins]",
                f"logger.mine.api_key={KEY}",
            ]
        )
    assert all(
        "is the secret of logger.mine.api_key and of no other key" in problem for problem in caught.value.problems
    )
    assert len(caught.value.problems) == 2


def test_a_part_that_was_not_told_says_so() -> None:
    with pytest.raises(WordsError, match=r"logger.mine.api_key: this process does not have the secret"):
        build({"_target_": "builtins.dict", "api_key": "${secret:logger.mine.api_key}"})


def test_a_signed_url_is_looked_at_and_not_shown() -> None:
    fsspec.filesystem("memory").pipe_file("/signed/a.txt?sig=Zx81kfpQ", b"text")
    words = ["model=gpt", "data=text", "out=memory://signed/run"]
    plan = plan_of(*words, "data.path=memory://signed/a.txt?sig=Zx81kfpQ")
    assert plan.data["path"] == "${secret:data.path}" and "Zx81kfpQ" not in plan_verb.show(plan)
    preflight.check(plan)
    with pytest.raises(PreflightError, match=r"data.path=\*\*\*: no file is there") as caught:
        preflight.check(plan_of(*words, "data.path=memory://signed/b.txt?sig=Zx81kfpQ"))
    assert "Zx81kfpQ" not in str(caught.value)
