"""Words become a Config, or every mistake is told at once."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain import recipe
from dtrain.__main__ import main
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.compose.check import sayable
from dtrain.config.elsewhere import OURS
from dtrain.config.schema import GROUPS, Config
from dtrain.errors import WordsError
from dtrain.resolve import resolve
from dtrain.result import Result
from dtrain.verb import train


def refused(*words: str) -> str:
    """What is said of words that are judged, composed and decided on."""
    with pytest.raises(WordsError) as caught:
        resolve(compose(words), Cluster(gpus=0, cpus=8))
    return str(caught.value)


def test_no_words_are_a_complete_run() -> None:
    config = compose([])
    assert (config.steps, config.choices["model"], config.optim["lr"]) == (1000, "gpt", 1e-3)
    assert config.sources == {}


def test_words_set_values_and_their_source_is_kept() -> None:
    config = compose(["steps=7", "optim=sgd", "optim.lr=1e-1", "mesh.dp_shard=2", "out=/tmp/a b"])
    assert (config.steps, config.optim["lr"], config.mesh.dp_shard, config.out) == (7, 0.1, 2, "/tmp/a b")
    assert config.optim["_target_"] == "dtrain.optim.sgd.build"
    assert config.sources["steps"] == "command line"


def test_an_argument_may_come_before_the_word_of_its_part() -> None:
    assert compose(["optim.lr=0.5", "optim=sgd"]).optim["lr"] == 0.5


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
        ("lr=3", "Type optim.lr=3."),
        ("layers=3", "Type model.layers=3."),
        ("optim.momentum=0.9", "optim=muon or optim=sgd has it."),
        (
            "objective.chunk=128",
            "objective=auto has no chunk. objective=dpo or objective=masked or objective=next_token has it.",
        ),
        ("logger.tensorbord.x=1", "Did you mean tensorboard?"),
        ("logger.console=1", "Type logger=[console]."),
        ("hook.sample.evry=3", "Did you mean hook.sample.every?"),
        ("--steps=3", "Type steps=3."),
        ("--log-every=3", "Type log.every=3."),
        ("~model", "Type model=<another word>."),
        ("mesh=2", "mesh.dp_shard=<value>"),
        ("batch=4,8", "Add -m"),
        ("data=tokens", "Type data.path=<text>."),
        ("model=[gpt]", "model takes one word."),
        ("recipe=nothing-like-it", "Or give a path or URL."),
        (
            "out=${oc.env:NOT_SET_HERE}",
            "the environment variable NOT_SET_HERE is not set. Type export NOT_SET_HERE=<value>",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(word: str, hint: str) -> None:
    assert hint in refused(word)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("strategy=FSDP", "fsdp"), ("strategy=Fsdp", "fsdp"), ("nodes=2:1", "nodes=1:2"), ("clip=none", "clip=null"), ("ema=off", "ema=null"), ("hook=none", "hook=[]"),
        ("schedule.warmup=50%", "schedule.warmup=0.5"), ("steps=10%", "steps=1000"), ("devices=0x10", "devices=auto"), ("time_limit=1:00:00:00", "time_limit=null"),
        ("time_limit=90min", "time_limit=5400"), ("steps=1,000", "steps=1"), ("optim.betas=0.9,0.99", "optim.betas=[0.9,0.99]"),
        ("optim.betas=(0.9,0.99)", "optim.betas=[0.9,0.99]"), ("trust=a,b", "trust=[a,b]"), ("trust=[a", "trust=[a]"),
        ("generate.prompt=a,b", "generate.prompt='a,b'"),
        ("data.dataset=mine.Faces", "data.dataset._target_=mine.Faces"), ("model=mine.nets.Net", "model._target_=mine.nets.Net"),
        ("--max_steps 3", "steps=3"), ("--learning-rate=1e-3", "optim.lr=1e-3"), ("--config-name digits", "recipe=digits"), ("-cn digits", "recipe=digits"),
        ("trainer.max_steps=3", "steps=3"), ("gpus=2", "devices=2"), ("seed=18446744073709551616", "seed=0"),
    ],
)  # fmt: skip
def test_what_is_advised_is_what_was_meant_and_is_taken(wrong: str, right: str) -> None:
    around = ["trust=[mine]", "data=dataset", "data.dataset._target_=mine.Faces"] if "mine" in wrong else []
    around = [word for word in around if word.split("=")[0] not in (wrong.split("=")[0], right.split("=")[0])]
    problems = further(*around, *wrong.split())
    assert any(re.search(rf"(Type|type|typed|mean) \"?{re.escape(right)}[\".?]", problem) for problem in problems), (
        problems
    )
    if "=" in right:
        assert further(*around, right) == ()


def further(*words: str) -> tuple[str, ...]:
    """What compose and resolve find wrong."""
    try:
        resolve(compose(words), Cluster(gpus=0, cpus=4))
    except WordsError as error:
        return error.problems
    return ()


def test_what_other_tools_call_it_is_told_in_words_that_there_are() -> None:
    assert set(OURS.values()) <= {*sayable(), "hydra.searchpath", "data.workers"}


def test_no_advice_where_there_is_nothing_near() -> None:
    for word in ("--foo=3", "~foo"):
        assert "Type" not in refused(word)


def test_a_part_of_your_own_may_stand_in_the_list_of_its_group() -> None:
    words = ["hook.mine._target_=mine.Hook", "trust=[mine]"]
    for listed in ("hook=[sample,mine]", "hook=mine"):
        assert "mine" in compose([listed, *words]).hook
    assert "hook.sample.every?" in refused("hook=[sample,mine]", *words, "hook.sample.evry=3")
    assert "hook.mine._target_=<package.Class>" in refused("hook=[mine]")


@pytest.mark.parametrize(
    "word",
    [
        "nodes=two",
        "steps=1.5",
        "seed=true",
        "clip=abc",
        "steps=null",
        "trust=a",
        "model.layers=a",
        "model.heads=null",
        "optim.betas=3",
    ],
)
def test_a_value_of_another_kind_is_refused_with_its_key(word: str) -> None:
    assert word.split("=")[0] in refused(word)


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("clip=1", lambda config: config.clip == 1),
        ("clip=null", lambda config: config.clip is None),
        ("optim.lr=1", lambda config: config.optim["lr"] == 1),
        ("checkpoint.keep=null", lambda config: config.checkpoint["keep"] is None),
        ("model.kv_heads=2", lambda config: config.model["kv_heads"] == 2),
        ("logger=[]", lambda config: config.logger == {}),
        ("logger=console", lambda config: list(config.logger) == ["console"]),
        (
            "schedule.warmup=0.1",
            lambda config: config.schedule["warmup"] == 0.1,
        ),  # the sentence of the key: below 1, that part of the run
    ],
)
def test_a_value_that_makes_sense_is_taken(word: str, read: Callable[[Config], bool]) -> None:
    assert read(compose([word]))


def test_a_dataset_of_mappings_names_its_keys() -> None:
    config = compose(
        [
            "data=dataset",
            "data.dataset._target_=mine.Faces",
            "data.dataset.root=/faces",
            "data.inputs=image",
            "data.targets=label",
        ]
    )
    assert (config.data["inputs"], config.data["targets"], config.data["dataset"]["root"]) == (
        "image",
        "label",
        "/faces",
    )


@pytest.mark.parametrize("text", ["it's", "é #1: {", "a\nb", "[1", " a=b(c):"])
def test_text_needs_no_quotes_and_survives_a_recipe(text: str, tmp_path: Path) -> None:
    config = compose([f"generate.prompt={text}"])
    assert config.generate.prompt == text
    (tmp_path / "r.yaml").write_text(recipe.write(config))
    assert compose([f"recipe={tmp_path}/r.yaml"]).generate.prompt == text


@pytest.mark.parametrize("text", ["2024_01", "007", "1e5"])
def test_a_name_made_of_digits_stays_as_typed(text: str) -> None:
    assert compose([f"out={text}"]).out == text


def test_anything_of_your_own_can_take_the_place_of_a_word() -> None:
    config = compose(["model._target_=mine.Net", "model.depth=3"])
    assert {key: value for key, value in config.model.items() if key != "_about_"} == {
        "_target_": "mine.Net",
        "depth": 3,
    }
    assert config.choices["model"] is None


# sweeps


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("words", [["seed=0,1", "stepz=3"], ["optim.lr=1e-3,fast"], ["model=gpt,mpl"]])
def test_a_mistake_in_a_sweep_stops_it_before_the_first_job(
    words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(train, "one", lambda config: begun.append(config) or Result("finished", 1, 1.0, 1.0))
    assert main(["-m", *words]) == WordsError.exit_code
    assert begun == []


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("seed=range(0,4)", "seed=0."),
        ("optim.lr=choice(1e-3,3e-3)", "optim.lr=0.001."),
        ("optim.betas=choice([0.9,0.95],[0.8,0.9])", "optim.betas=[0.9,0.95]."),
        ("seed=interval(0,4)", "seed=<one value>."),
        ("model=choice(gpt,mlp)", "model=gpt."),
        ("model=gpt,mlp", "model=gpt."),
        ("logger=choice(console,tensorboard)", "logger=[console,tensorboard]."),
        ("logger=console,tensorboard", "logger=[console,tensorboard]."),
        ("data.path=glob(a,b)", "\"data.path='glob(a,b)'\"."),
    ],
)
def test_a_comma_inside_a_call_parts_nothing(word: str, instead: str) -> None:
    with pytest.raises(WordsError) as caught:
        compose([word])
    assert caught.value.problems[0].endswith(instead)


def test_what_only_verify_reads_is_refused_where_it_is_typed(here: Path) -> None:
    with pytest.raises(WordsError, match=r"verify.steps \(command line\): only verify uses it"):
        train.one(compose(["verify.steps=3", "out=x"]))


def test_the_schema_knows_every_group() -> None:
    assert set(GROUPS) <= set(vars(compose([])))


def test_what_other_tools_have_and_dtrain_has_not_is_told_with_what_to_type() -> None:
    assert refused("adapter=qdora") == (
        "adapter=qdora (command line): there is no adapter qdora. A base in 4 bits takes LoRA alone. Type adapter=qlora, or adapter=dora precision=bf16_true."
    )
