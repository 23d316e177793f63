"""A space that stands in a recipe: swept like typed words, with the rights of a recipe."""

from pathlib import Path
from typing import Any

import commands
import fsspec
import pytest

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.resolve import resolve
from dtrain.sweep import jobs
from dtrain.sweep.space import Choices, Interval

RUN = "model: mlp\ndata: synthetic\nobjective: regression\nsteps: 4\nhook: []\nlogger: []\n"
SPACE = """\
optim: {lr: 0.5}
sweep:
  parallel: 2
  space:
    optim.lr: [1e-3, 3e-3]
    seed: range(0,2)
    model:
      width: choice(8,16)
"""


def recipe(place: Path, text: str, name: str = "mine") -> str:
    (place / f"{name}.yaml").write_text(text)
    return f"recipe={place}/{name}.yaml"


def axes(*words: str) -> dict[str, Any]:
    space = jobs.read([*words, "sweep.out=s"]).space
    return {axis.key: axis.values if isinstance(axis, Choices) else axis for axis in space}


def refused(*words: str) -> str:
    with pytest.raises(WordsError) as caught:
        jobs.judged(jobs.read([*words]), Cluster(0, 2), resolve)
    return "\n".join(caught.value.problems)


def test_a_recipe_sweeps_what_its_space_lists(tmp_path: Path) -> None:
    mine = recipe(tmp_path, RUN + SPACE)
    assert axes(mine) == {"optim.lr": (0.001, 0.003), "seed": (0, 1), "model.width": (8, 16)}
    judged = jobs.judged(jobs.read([mine, "sweep.out=s"]), Cluster(0, 8), resolve)
    assert len(judged.jobs) == 8 and judged.slots == 2
    assert judged.config.optim["lr"] == 0.001, "what is swept replaces the recipe's single value"
    assert judged.jobs[0].name.startswith("optim.lr-0.001_seed-0_model.width-8-")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("seed=7",), {"optim.lr": (0.001, 0.003), "model.width": (8, 16)}),
        (("seed=7,8",), {"optim.lr": (0.001, 0.003), "model.width": (8, 16), "seed": (7, 8)}),
        (("batch=4,8",), {"optim.lr": (0.001, 0.003), "seed": (0, 1), "model.width": (8, 16), "batch": (4, 8)}),
        (("model=cnn",), {"optim.lr": (0.001, 0.003), "seed": (0, 1)}),
        (("model=mlp",), {"optim.lr": (0.001, 0.003), "seed": (0, 1), "model.width": (8, 16)}),
    ],
)
def test_typed_words_win_and_typed_spaces_add(
    typed: tuple[str, ...], expected: dict[str, object], tmp_path: Path
) -> None:
    assert axes(recipe(tmp_path, RUN + SPACE), *typed) == expected


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("3", (3,)),
        ("'3'", (3,)),
        ("1e-3,3e-3", (0.001, 0.003)),
        ("[a, 'b,c', null, [1, 2]]", ("a", "b,c", None, [1, 2])),
        ("sort(3,1,2)", (1, 2, 3)),
        ("it's one text", ("it's one text",)),
        ("tag(log,interval(1e-4,1e-2))", Interval("key", 1e-4, 1e-2, True, False)),
    ],
)
def test_values_are_read_as_on_the_command_line(written: str, values: object, tmp_path: Path) -> None:
    quoted = written if written[0] in "['" or written.isdigit() else f'"{written}"'
    assert axes(recipe(tmp_path, f"sweep: {{space: {{key: {quoted}}}}}")) == {"key": values}


def test_a_recipe_builds_on_the_space_of_another(tmp_path: Path) -> None:
    recipe(tmp_path, RUN + SPACE, "base")
    mine = recipe(tmp_path, "recipe: base.yaml\nseed: 5\nsweep: {space: {optim.lr: [1, 2]}}")
    assert axes(mine) == {"model.width": (8, 16), "optim.lr": (1, 2)}
    assert axes(mine) == axes(f"recipe=[{tmp_path}/base.yaml,{tmp_path}/mine.yaml]")


def test_without_m_a_recipe_with_a_space_is_one_run(tmp_path: Path) -> None:
    config = compose([recipe(tmp_path, RUN + SPACE)])
    assert (config.optim["lr"], config.seed) == (0.5, 0)
    done = commands.run("recipe=mine.yaml", "data.samples=64", "out=one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "note: sweep.space (mine.yaml:11): this is one run. Type -m" in done.stderr
    assert "sweep" not in (tmp_path / "one" / "config.yaml").read_text()


def test_its_jobs_run_and_its_settings_count(tmp_path: Path) -> None:
    recipe(tmp_path, RUN + "sweep: {fail: stop, parallel: 1, space: {steps: [2, 3], seed: 'range(0,2)'}}")
    done = commands.run("-m", "recipe=mine.yaml", "data.samples=64", "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 jobs in s; 1 at a time" in done.stdout
    again = commands.run("sweep", "work", "s", cwd=tmp_path)
    assert "4 jobs in s, of which 4 are finished" in again.stdout, again.stderr


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sweep: {out: x, space: {seed: [0, 1]}}", "sweep.out cannot come from a recipe"),
        ("sweep: {space: {out: [a, b]}}", "a recipe cannot sweep out"),
        ("sweep: {space: {trust: [[os]]}}", "a recipe cannot sweep trust"),
        ("sweep: {space: {sweep.parallel: [1, 2]}}", "a recipe cannot sweep sweep.parallel"),
        ("sweep: {space: {recipe: [a, b]}}", "a recipe cannot sweep recipe"),
        ("sweep: {space: {logger.x.api_key: [a, b]}}", "a secret cannot be"),
        ("sweep: {space: 3}", "a mapping of keys to values"),
        ("sweep: {space: {seed: []}}", "seed=[] (here.yaml:1): no value"),
        ("sweep: {space: {seed: 'range(3,3)'}}", "an empty range"),
        ("sweep: {space: {}}", "a mapping of keys to values"),
        ("sweep: {space: {seed: [0, 1], optim: 'sgd,adamw,'}}", "optim='sgd,adamw,' (here.yaml:1) is one text"),
    ],
)
def test_what_no_recipe_may_sweep(text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.yaml").write_text(text)
    assert sentence in refused("recipe=here.yaml")


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        ("{data.path: [/etc/passwd]}", "from elsewhere"),
        ("{data.path: \"choice('/etc/passwd',x)\"}", "from elsewhere"),
        ("{data.path: 'http://169.254.169.254/a,b'}", "from elsewhere"),
        ("{data.name: ['${oc.env:HOME}']}", "from elsewhere"),
        ("{data.name: \"choice('${oc.env:HOME}',x)\"}", "from elsewhere"),
        ("{data.name: ['${model.width}']}", "sweeps plain values alone"),
        ("{loop: [mine.loop]}", "loop cannot come from a recipe from elsewhere"),
        ("{hook.mine._target_: [mine.Hook]}", "cannot bring code to hook"),
        ("{model.trust_remote_code: [true]}", "cannot run downloaded code"),
    ],
)
def test_a_space_from_elsewhere_has_the_rights_of_its_place(space: str, sentence: str) -> None:
    fsspec.filesystem("memory").pipe("/spaces/mine.yaml", f"sweep: {{space: {space}}}".encode())
    assert sentence in refused("recipe=memory://spaces/mine.yaml")


def test_a_space_from_elsewhere_may_sweep_numbers() -> None:
    fsspec.filesystem("memory").pipe("/spaces/fine.yaml", (RUN + SPACE).encode())
    assert len(axes("recipe=memory://spaces/fine.yaml")) == 3


def test_a_recipe_that_is_swept_brings_no_sweep_of_its_own(tmp_path: Path) -> None:
    recipe(tmp_path, RUN, "a")
    recipe(tmp_path, RUN + SPACE, "b")
    assert "sweep.parallel is for a sweep of this recipe alone" in refused(
        f"recipe={tmp_path}/a.yaml,{tmp_path}/b.yaml"
    )
    assert axes(f"recipe={tmp_path}/a.yaml,digits") == {"recipe": (f"{tmp_path}/a.yaml", "digits")}


def test_an_argument_that_a_class_does_not_take_has_the_line_of_the_recipe(tmp_path: Path) -> None:
    own = "model: {_target_: sweeping.Known}\ndata: synthetic\nobjective: own\nsweep.space:\n  model.xx: [1, 2]\n"
    with pytest.raises(WordsError) as raised:
        jobs.judged(jobs.read([recipe(tmp_path, own), "trust=[sweeping]", "sweep.out=s"]), Cluster(0, 8), resolve)
    assert f"(model.xx: {tmp_path}/mine.yaml:5)" in raised.value.problems[0], raised.value.problems


def test_a_search_stands_in_a_recipe(tmp_path: Path) -> None:
    search = "sweep: {search: random, trials: 5, space: {optim.lr: 'tag(log,interval(1e-4,1e-2))'}}"
    judged = jobs.judged(jobs.read([recipe(tmp_path, RUN + search), "sweep.out=s"]), Cluster(0, 8), resolve)
    assert (judged.study.method, judged.study.trials) == ("random", 5)
    wrong = recipe(tmp_path, RUN + "sweep: {retries: -1, space: {seed: [0, 1]}}")
    with pytest.raises(WordsError, match=r"sweep.retries=-1 \(.*mine.yaml:7\)"):
        jobs.judged(jobs.read([wrong, "sweep.out=s"]), Cluster(0, 8), resolve)
