"""What a model of one's own declares is read off its source: a mesh that it cannot take is refused before launch, without torch."""

import sys
from pathlib import Path

import pytest
from small import plan

from dtrain.errors import WordsError

LLAMA = "model._target_=transformers.LlamaForCausalLM model.config._target_=transformers.LlamaConfig trust=[transformers] data=synthetic objective=next_token strategy=ddp"
OWN = "trust=[netpkg] data=synthetic objective=regression strategy=ddp devices=2"
NETS = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(x)

class Free(Plain):
    pass
"""
TABLES = NETS.replace(
    "    def __init__", "    tp_plan = {'out': 'colwise_gather_output'}\n    pipeline = ('out',)\n\n    def __init__"
).replace("(self, x)", "(self, x, **others)")
HOLDS = NETS + "\nfrom transformers import LlamaForCausalLM\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            "devices=2 mesh.tp=2 model.config.num_attention_heads=3",
            "mesh.tp=2 does not divide model.config.num_attention_heads=3. Type mesh.tp=1.",
        ),
        (
            "devices=4 mesh.tp=4 model.config.num_attention_heads=8 model.config.num_key_value_heads=2",
            "model.config.num_key_value_heads=2. Type mesh.tp=2.",
        ),
        ("devices=2 mesh.pp=2 model.config.tie_word_embeddings=true", "Type model.config.tie_word_embeddings=false"),
    ],
)
def test_sizes_of_a_hugging_face_config_are_read(words: str, why: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*LLAMA.split(), *words.split())
    assert why in str(caught.value)
    assert "transformers.models.llama.configuration_llama" not in sys.modules or "torch" in sys.modules


def test_sizes_that_divide_and_configs_without_such_a_plan_are_taken() -> None:
    assert (
        plan(
            *LLAMA.split(),
            "devices=2",
            "mesh.tp=2",
            "model.config.num_attention_heads=4",
            "model.config.num_key_value_heads=2",
        ).mesh.tp
        == 2
    )
    whole = LLAMA.replace("Llama", "DeepseekV3")  # whose attention is not split
    assert plan(*whole.split(), "devices=2", "mesh.tp=2", "model.config.num_attention_heads=3").mesh.tp == 2


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "netpkg").mkdir()
    (tmp_path / "netpkg" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "netpkg"


@pytest.mark.parametrize(
    ("axis", "why"),
    [
        ("tp", "netpkg.nets.Plain has no tensor-parallel plan"),
        ("pp", "does not say where it may be cut"),
        ("cp", "takes no position_ids"),
    ],
)
def test_a_class_without_tables_is_refused(axis: str, why: str, nets: Path) -> None:
    (nets / "nets.py").write_text(NETS)
    with pytest.raises(WordsError, match=why):
        plan(*OWN.split(), "model._target_=netpkg.nets.Plain", f"mesh.{axis}=2")


@pytest.mark.parametrize("axis", ["tp", "pp"])
@pytest.mark.parametrize(("source", "name"), [(TABLES, "Plain"), (HOLDS, "Plain"), (NETS, "Free"), (NETS, "make")])
def test_what_may_have_tables_is_left_to_the_ranks(source: str, name: str, axis: str, nets: Path) -> None:
    (nets / "nets.py").write_text(source + "\ndef make():\n    return Plain()\n")
    assert plan(*OWN.split(), f"model._target_=netpkg.nets.{name}", f"mesh.{axis}=2")


DATASETS = """
class Named:
    classes = ("cat", "dog", "owl")

class Changed:
    classes = 3
    def __init__(self):
        self.classes = 2

class Shaped:
    about: ClassVar = {"inputs": (1, 8, 8), "targets": []}
    classes = 10

class Other:
    about = {"inputs": "pictures", "outputs": 99}
    classes = True
"""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("Named", "model=mlp", "data.outputs=2"),
            "data.outputs=2: the dataset has 3 classes. Type data.outputs=3, or leave it out.",
        ),
        (("Named", "model=mlp", "model.outputs=2"), "model.outputs=2: the data has 3. Type model.outputs=auto."),
        (
            ("Named", "model=gpt", "data.outputs=9", "model.vocab=8"),
            "model.vocab=8: the data has 9. Type model.vocab=auto.",
        ),
        (
            ("Shaped", "model=cnn", "model.inputs=[3,4,4]"),
            "model.inputs=[3, 4, 4]: a sample of the data has the shape [1, 8, 8]. Type model.inputs=auto.",
        ),
        (
            ("Shaped", "model=mlp", "objective=regression", "model.outputs=10"),
            "the model outputs 10 numbers, but a target of the data has 1. Type data.outputs=1, or",
        ),
        (("Shaped", "model=mlp", "model.inputs=63"), "model.inputs=63: a sample of the data has the shape [1, 8, 8]."),
        (
            ("Shaped", "model=cnn", "model.width=1", "model.stages=5"),
            "stage 4 has one number per group of channels of an image [1, 8, 8]",
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_what_a_dataset_states_is_held_against_the_model_before_launch(
    words: tuple[str, ...], why: str, nets: Path
) -> None:
    (nets / "sets.py").write_text(DATASETS)
    with pytest.raises(WordsError) as caught:
        plan("data=dataset", f"data.dataset._target_=netpkg.sets.{words[0]}", "trust=[netpkg]", *words[1:])
    assert [why in problem for problem in caught.value.problems] == [True]


@pytest.mark.parametrize(
    "words",
    [
        ("Named", "model=mlp", "data.outputs=1", "objective=regression"), ("Named", "model=mlp", "data.outputs=4"), ("Changed", "model=mlp", "data.outputs=2"),
        ("Shaped", "model=mlp", "objective=regression"), ("Shaped", "model=mlp", "objective=regression", "model.outputs=1"), ("Shaped", "model=mlp", "model.inputs=64"), ("Shaped", "model=cnn", "model.inputs=[1,8,8]"), ("Other", "model=mlp", "model.inputs=3", "model.outputs=2"), ("Shaped", "model=mlp", "model.inputs=5", "data.inputs=1", "data.targets=0"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_model_that_fits_what_a_dataset_states_is_taken(words: tuple[str, ...], nets: Path) -> None:
    (nets / "sets.py").write_text(DATASETS)
    plan("data=dataset", f"data.dataset._target_=netpkg.sets.{words[0]}", "trust=[netpkg]", *words[1:])


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        ("from netpkg.sets import Faces\nclass Mine(Faces):\n    pass\n", 125),
        (
            "from netpkg.sets import *\nclass Mine(Sequence, Faces):\n    def __getitem__(self, i):\n        about = 3\n        return about\n",
            125,
        ),
        (
            "import netpkg.sets as sets\nclass Other(sets.Faces):\n    pass\nclass Mine(Other):\n    about = {'samples': 800}\n",
            100,
        ),
        ("from netpkg.sets import Faces\nclass Mine(Faces):\n    about = made_elsewhere()\n", None),
        ("from netpkg.sets import Faces\nclass Mine(Faces):\n    def about(self):\n        pass\n", None),
    ],
)
def test_what_a_class_states_is_stated_by_those_that_are_derived_from_it(
    source: str, steps: int | None, nets: Path
) -> None:
    (nets / "sets.py").write_text("class Faces:\n    about = {'samples': 1000}\n")
    (nets / "mine.py").write_text(source)
    words = (
        "data=dataset",
        "data.dataset._target_=netpkg.mine.Mine",
        "data.holdout=0",
        "model=mlp",
        "trust=[netpkg]",
        "epochs=1",
    )
    if steps is None:
        with pytest.raises(WordsError, match="the samples cannot be counted: "):
            plan(*words)
    else:
        assert plan(*words).steps == steps
