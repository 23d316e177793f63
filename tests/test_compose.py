"""Words become a Config, or every mistake is told at once. Recipes are words written down."""

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from dtrain.cluster import Cluster
from dtrain.compose import compose, folder, multirun, to_recipe
from dtrain.config import GROUPS, Config
from dtrain.errors import WordsError
from dtrain.resolve import resolve


def refused(*words: str) -> str:
    with pytest.raises(WordsError) as caught:
        compose(words)
    return str(caught.value)


def test_no_words_are_a_complete_run() -> None:
    config = compose([])
    assert (config.steps, config.choices["model"], config.optim["lr"]) == (600, "gpt", 1e-3)
    assert config.sources == {}


def test_words_set_values_and_their_source_is_kept() -> None:
    config = compose(["steps=7", "optim=sgd", "optim.lr=1e-1", "mesh.dp_shard=2", "out=/tmp/a b"])
    assert (config.steps, config.optim["lr"], config.mesh.dp_shard, config.out) == (7, 0.1, 2, "/tmp/a b")
    assert config.optim["_target_"] == "dtrain.optim.sgd.build"
    assert config.sources["steps"] == "command line"


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(WordsError) as caught:
        compose(["stratgy=fsdp", "optim.lrr=3", "model=gtp", "--foo", "nodes=two", "batch=4,8"])
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("stratgy=fsdp", "Did you mean strategy?"),
        ("model=gtp", "Did you mean gpt?"),
        ("optim.lrr=3", "Did you mean optim.lr?"),
        ("lr=3", "Did you mean optim.lr?"),
        ("layers=3", "Did you mean model.layers?"),
        ("optim.momentum=0.9", "optim=muon has it."),
        ("logger.tensorbord.x=1", "Did you mean tensorboard?"),
        ("hook.sample.every=3", "Type hook=[sample] as well."),
        ("--steps=3", "Type steps=3."),
        ("--log-every=3", "Type log_every=3."),
        ("~model", "Type model=<another word>."),
        ("mesh=2", "mesh.dp_shard=<value>"),
        ("batch=4,8", "Add -m"),
        ("data=tokens", "Type data.path=<value>."),
        ("model=[gpt]", "model takes one word."),
        ("recipe=nothing-like-it", "Or give a path or URL."),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(word: str, hint: str) -> None:
    assert hint in refused(word)


@pytest.mark.parametrize(
    "word", ["nodes=two", "steps=1.5", "seed=true", "clip=abc", "steps=null", "trust=a", "model.layers=a", "model.heads=null", "optim.betas=3"]
)
def test_a_value_of_another_kind_is_refused_with_its_key(word: str) -> None:
    assert word.split("=")[0] in refused(word)


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("clip=1", lambda config: config.clip == 1),
        ("clip=null", lambda config: config.clip is None),
        ("optim.lr=1", lambda config: config.optim["lr"] == 1),
        ("model.kv_heads=2", lambda config: config.model["kv_heads"] == 2),
        ("logger=[]", lambda config: config.logger == {}),
        ("logger=console", lambda config: list(config.logger) == ["console"]),
        ("schedule.warmup=0.1", lambda config: config.schedule["warmup"] == 0.1),  # the sentence of the key: below 1, that part of the run
    ],
)
def test_a_value_that_makes_sense_is_taken(word: str, read: Callable[[Config], bool]) -> None:
    assert read(compose([word]))


def test_a_dataset_of_mappings_names_its_keys() -> None:
    config = compose(["data=dataset", "data.dataset._target_=mine.Faces", "data.dataset.root=/faces", "data.inputs=image", "data.targets=label"])
    assert (config.data["inputs"], config.data["targets"], config.data["dataset"]["root"]) == ("image", "label", "/faces")


@pytest.mark.parametrize("text", ["it's", "é #1: {", "a\nb", "[1", " a=b(c):"])
def test_text_needs_no_quotes_and_survives_a_recipe(text: str, tmp_path: Path) -> None:
    config = compose([f"generate.prompt={text}"])
    assert config.generate.prompt == text
    (tmp_path / "r.yaml").write_text(to_recipe(config))
    assert compose([f"recipe={tmp_path}/r.yaml"]).generate.prompt == text


@pytest.mark.parametrize("text", ["2024_01", "007", "1e5"])
def test_a_name_made_of_digits_stays_as_typed(text: str) -> None:
    assert compose([f"out={text}"]).out == text


def test_anything_of_your_own_can_take_the_place_of_a_word() -> None:
    config = compose(["model._target_=mine.Net", "model.depth=3"])
    assert {key: value for key, value in config.model.items() if key != "_about_"} == {"_target_": "mine.Net", "depth": 3}
    assert config.choices["model"] is None


# recipes


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "mine.yaml").write_text(text)
    return f"recipe={tmp_path}/mine.yaml"


def test_a_recipe_comes_before_the_words(tmp_path: Path) -> None:
    recipe = written(tmp_path, "defaults:\n  - override /optim: sgd\noptim: {lr: 0.5, momentum: 0.0}\nsteps: 5\n")
    config = compose(["steps=6", recipe])
    assert (config.steps, config.optim["lr"], config.optim["momentum"]) == (6, 0.5, 0.0)
    assert config.sources["steps"] == "command line"
    assert config.sources["optim.lr"].endswith("mine.yaml")


def test_the_last_recipe_wins(tmp_path: Path) -> None:
    for name, steps in (("a", 5), ("b", 6)):
        (tmp_path / f"{name}.yaml").write_text(f"steps: {steps}\n{'seed: 4' if name == 'a' else ''}\n")
    config = compose([f"recipe=[{tmp_path}/a.yaml,{tmp_path}/b.yaml]"])
    assert (config.steps, config.seed) == (6, 4)


def test_another_choice_drops_the_arguments_of_the_recipe(tmp_path: Path) -> None:
    recipe = written(tmp_path, "defaults:\n  - override /model: mlp\n  - override /data: synthetic\nmodel: {width: 7}\n")
    config = compose([recipe, "model=gpt"])
    assert config.model["width"] == 128


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n b: 2", "mine.yaml:2:3: not YAML"),
        ("- 1", "a mapping of words to values is expected"),
        ("trust: [x]", "trust cannot come from a recipe"),
        ("out: /tmp", "out cannot come from a recipe"),
        ("defaults:\n  - model: gpt\n", "override /model: gpt"),
        ("modl: 3", "Did you mean model?"),
        ("optim: {lrr: 3}", "Did you mean optim.lr?"),
    ],
)
def test_a_broken_recipe_is_named_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    message = refused(written(tmp_path, text))
    assert said in message
    assert "mine.yaml" in message


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/none.yaml: it does not exist" in refused(f"recipe={tmp_path}/none.yaml")


def test_a_recipe_may_lie_at_any_url() -> None:
    fsspec.filesystem("memory").pipe_file("/far.yaml", b"steps: 9")
    assert compose(["recipe=memory://far.yaml"]).steps == 9


def test_a_recipe_from_elsewhere_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    fsspec.filesystem("memory").pipe_file("/spy.yaml", b'data: {path: "https://elsewhere/${oc.env:SECRET}"}')
    assert "oc.env" in refused("recipe=memory://spy.yaml")


RECIPES = folder("conf").with_name("recipes")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_resolves(path: Path) -> None:
    assert resolve(compose([f"recipe={path.stem}", *(["data.path=x"] if "???" in path.read_text() else [])]), Cluster(gpus=8, cpus=8)).steps > 0


# config.yaml


def test_config_yaml_runs_the_same_plan_again(tmp_path: Path) -> None:
    first = compose(["strategy=fsdp", "devices=2", "optim=muon", "optim.lr=0.5", "logger=[console]", "data.holdout=0.2", "out=runs/a"])
    (tmp_path / "config.yaml").write_text(to_recipe(first))
    again = compose([f"recipe={tmp_path}/config.yaml", "out=runs/a"])
    here = Cluster(gpus=0, cpus=4)
    one, two = resolve(first, here).to_dict(), resolve(again, here).to_dict()
    assert {key: (one[key], two[key]) for key in one if one[key] != two[key]} == {}


def test_a_mistake_beside_config_yaml_is_still_found(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_recipe(compose([])))
    assert "optim.lr" in refused(f"recipe={tmp_path}/config.yaml", "optim.lrr=1")


def test_config_yaml_says_where_each_value_came_from() -> None:
    lines = to_recipe(compose(["optim.lr=0.5", "trust=[mine]"])).splitlines()
    assert "  lr: 0.5  # command line" in lines
    assert "# needs trust=['mine']" in lines
    assert not any(line.startswith("trust") for line in lines), "trust is given anew each time"


def test_another_verb_looks_from_any_mesh(tmp_path: Path) -> None:
    config = compose(["strategy=fsdp", "nodes=2", "devices=2", "model.layers=3", "microbatch=1", "resume=must"])
    (tmp_path / "config.yaml").write_text(to_recipe(config))
    looking = compose(["generate.tokens=3"], run=str(tmp_path))
    assert (looking.model["layers"], looking.generate.tokens) == (3, 3)
    assert (looking.nodes, looking.devices, looking.microbatch, looking.resume, looking.choices["strategy"]) == (1, "auto", None, "auto", "auto")


# sweeps


def test_a_sweep_runs_every_combination_in_a_folder_of_its_own(tmp_path: Path) -> None:
    jobs: list[Config] = []
    words = ["seed=0,1", "optim.lr=1e-3,3e-3", "steps=5", f"sweep.out={tmp_path}"]
    results = multirun(words, lambda config: jobs.append(config) or float(config.seed))
    assert [(job.seed, job.optim["lr"], job.steps) for job in jobs] == [(0, 1e-3, 5), (0, 3e-3, 5), (1, 1e-3, 5), (1, 3e-3, 5)]
    assert results == [0.0, 0.0, 1.0, 1.0]
    assert len({job.out for job in jobs}) == 4
    assert all(str(job.out).startswith(f"{tmp_path}/") for job in jobs)


def test_a_sweep_may_swap_words_of_a_group(tmp_path: Path) -> None:
    jobs: list[Config] = []
    multirun(["model=gpt,mlp", "data=synthetic", f"out={tmp_path}"], lambda config: jobs.append(config))
    assert [job.choices["model"] for job in jobs] == ["gpt", "mlp"]


@pytest.mark.parametrize("words", [["seed=0,1", "stepz=3"], ["optim.lr=1e-3,fast"], ["model=gpt,mpl"]])
def test_a_mistake_in_a_sweep_stops_it_before_the_first_job(words: list[str]) -> None:
    jobs: list[Config] = []
    with pytest.raises(WordsError):
        multirun(words, lambda config: jobs.append(config))
    assert jobs == []


def test_the_schema_knows_every_group() -> None:
    assert set(GROUPS) <= set(vars(compose([])))
