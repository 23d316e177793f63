"""What is composed without Hydra is what Hydra composes."""

from dataclasses import asdict
from pathlib import Path

import pytest

from dtrain import recipe
from dtrain.compose import compose
from dtrain.errors import WordsError

WORDS: tuple[tuple[str, ...], ...] = (
    (),
    ("steps=7", "clip=1", "clip=null", "ema=0", "generate.temperature=1", "grace=5", "seed=1_000"),
    ("model=mlp", "data=synthetic", "objective=regression", "optim=sgd", "optim.lr=1", "schedule=wsd"),
    (
        "model=moe",
        "model.experts=4",
        "strategy=fsdp",
        "strategy.reshard=never",
        "mesh.tp=2",
        "devices=4",
        "pipeline.split=[2,1]",
    ),
    ("model._target_=mine.Net", "model.depth=3", "model.inner.a=1", "model.inner.b={c:[1,2]}", "trust=[mine,1]"),
    (
        "data=dataset",
        "data.dataset._target_=mine.Faces",
        "data.dataset.root=/faces",
        "data.inputs=image",
        "data.targets=1",
    ),
    (
        "data=dataset",
        "data.dataset={_target_:mine.Faces,root:/faces}",
        "data.dataset.extra={a:1}",
        "data.dataset.extra.b=2",
    ),
    ("logger=[]", "hook=[sample]", "hook.sample.every=3", "hook.sample.prompt='a, b'"),
    ("hook.sample.every=3", "hook.fault._target_=dtrain.testing.faults.AtStep", "hook.fault.step=2", "logger=console"),
    ("out=2024_01", "data.path=007", "nodes=1:2", "time_limit=1:00:00", "launcher=local", "launcher.address=1.2.3.4:5"),
    (
        "hook=[sample,fault]",
        "hook.fault._target_=dtrain.testing.faults.AtStep",
        "hook.fault.step=2",
        "hook.sample.every=3",
    ),
    ("model.width=${model.heads}", "steps=${batch}", "out=a${seed}b"),
)


def test_a_group_in_a_text_is_its_word() -> None:
    """Never the part itself, which was a folder of a strange name."""
    assert compose(["model=mlp", "out=runs/${model}-${strategy}-${seed}"]).out == "runs/mlp-auto-0"
    assert compose(["model=mlp", "out=${model}"]).out == "mlp"
    for word, part in (
        ("out=a/${mesh}", "mesh"),
        ("out=${data._about_}b", "data._about_"),
        ("out=${logger}/b", "logger"),
    ):
        with pytest.raises(WordsError, match=rf"{part} holds several values, not a text. Type \$\{{{part}.<a name>\}}"):
            compose([word])
    with pytest.raises(WordsError, match="model holds several values"):
        compose(["model._target_=mine.Net", "out=a/${model}"])


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_both_ways_give_the_same_config(words: tuple[str, ...], tmp_path: Path) -> None:
    ours, hydras = compose(words), compose([*words, f"hydra.searchpath=[{tmp_path}]"])
    assert repr(asdict(ours)) == repr(asdict(hydras))


def test_words_of_a_folder_of_your_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text(
        "defaults: [/model/gpt, _self_]\n_target_: mine.Net\nlayers: 2\nfloor: 0.5\n_about_: {allowed: {floor: number >= 0 and <= 1}}\n"
    )
    config = compose(["model=mine", "model.floor=0.25", f"hydra.searchpath=[{tmp_path}]"])
    assert (config.model["_target_"], config.model["layers"], config.model["floor"]) == ("mine.Net", 2, 0.25)
    with pytest.raises(WordsError, match=r"Did you mean model.floor"):
        compose(["model=mine", "model.flor=1", f"hydra.searchpath=[{tmp_path}]"])
    (tmp_path / "model/broken.yaml").write_text("a: [1\n")
    with pytest.raises(WordsError, match=r"model=broken \(command line\): .*/model/broken.yaml:2: not YAML"):
        compose(["model=broken", f"hydra.searchpath=[{tmp_path}]"])


def test_what_a_file_of_your_own_refers_to_is_what_its_part_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/mine.yaml").write_text(
        "_target_: mine.build\nlr: 0.5\nhead_lr: ${optim.lr}\nbody_lr: ${.lr}\nbetas: ['${optim.lr}', 0.9]\nnamed: run-${seed}\nwhere: ${oc.env:MINE}\n"
    )
    path = f"hydra.searchpath=[{tmp_path}]"
    monkeypatch.setenv("MINE", "/there")
    config = compose(["optim=mine", "optim.lr=0.25", "seed=3", path])
    assert config.optim == {
        "_target_": "mine.build",
        "lr": 0.25,
        "head_lr": 0.25,
        "body_lr": 0.25,
        "betas": [0.25, 0.9],
        "named": "run-3",
        "where": "/there",
    }
    assert "where: '${oc.env:MINE}'" in recipe.write(config), "looked up anew where it is run again"
    assert compose(["optim=mine", "optim.head_lr=1", path]).optim["head_lr"] == 1
    (tmp_path / "optim/mine.yaml").write_text("_target_: mine.build\nlr: ${optim.rate}\n")
    with pytest.raises(WordsError, match=r"optim.lr=.*\(.*mine.yaml:2\): there is no key optim.rate to refer to"):
        compose(["optim=mine", path])


@pytest.mark.parametrize("kind", ["hydra", "mine"])
def test_a_reference_of_another_kind_is_told_with_those_that_there_are(kind: str) -> None:
    with pytest.raises(WordsError, match=rf"\$\{{{kind}:\.\.\.\}} has no meaning here\. There are .*oc\.env"):
        compose([f"out=runs/${{{kind}:job.name}}"])
