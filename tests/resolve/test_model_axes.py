"""What a mesh splits must divide; what is refused is refused before launch, with the degrees that work."""

import re

import pytest
from small import plan

from dtrain.errors import WordsError

SYNTHETIC = ("strategy=ddp", "data=synthetic", "batch=48")
TABLE = [
    # tp: heads, key-value heads and widths
    (("mesh.tp=3", "devices=12"), "mesh.tp=3 does not divide model.heads=4. Type mesh.tp=2 or mesh.tp=4."),
    (("mesh.tp=4", "devices=4", "model.kv_heads=2"), "mesh.tp=4 does not divide model.kv_heads=2. Type mesh.tp=2."),
    (("mesh.tp=4", "devices=4", "model.hidden=90"), "mesh.tp=4 does not divide model.hidden=90. Type mesh.tp=2."),
    (
        ("mesh.tp=2", "devices=6", "model=mlp", "model.width=15"),
        "mesh.tp=2 does not divide model.width=15. Type mesh.tp=1 or mesh.tp=3.",
    ),
    (
        ("mesh.tp=2", "devices=2", "model=cnn"),
        "model=cnn has no matrices that tensor parallelism could split. Leave mesh.tp out.",
    ),
    (
        ("mesh.tp=2", "devices=2", "tensor.sequence=split", "data.sequence=17"),
        "data.sequence=17 is not divisible by cp x tp = 2. Type data.sequence=18.",
    ),
    (
        ("mesh.tp=2", "devices=2", "tensor.sequence=split", "model=mlp"),
        "tensor.sequence=split: model=mlp keeps its sequences whole",
    ),
    (
        ("mesh.tp=2", "devices=2", "model=moe", "model.shared=1", "model.hidden=5"),
        "does not divide model.shared=1 x model.hidden=5. Type model.hidden=6.",
    ),
    # pp: blocks
    (
        ("mesh.pp=8", "devices=8"),
        "mesh.pp=8 x 1 stage(s) on each rank = 8 stages, but model.layers=4 = 4 blocks. Type mesh.pp=4, or model.layers=8.",
    ),
    (
        ("mesh.pp=4", "devices=4", "pipeline.schedule=zbv"),
        "mesh.pp=4 x 2 stage(s) on each rank = 8 stages, but model.layers=4 = 4 blocks. Type mesh.pp=2, or model.layers=8.",
    ),
    (
        ("mesh.pp=4", "devices=4", "model=cnn", "model.stages=1", "model.blocks=3"),
        "but model.stages=1 x model.blocks=3 = 3 blocks.",
    ),
    (("mesh.pp=2", "devices=2", "pipeline.split=[1,2]"), "pipeline.split=[1, 2] is 3 blocks, but model.layers=4 = 4."),
    (
        ("mesh.pp=2", "devices=2", "model.tied=true"),
        "model.tied=true is one weight in the first and the last stage. Type model.tied=false",
    ),
    (
        ("mesh.pp=2", "devices=2", "model=mlp", "model.layers=1"),
        "but model.layers=1 = 1 blocks. Type mesh.pp=1, or model.layers=2.",
    ),
    # ep: experts
    (("mesh.ep=2", "devices=2"), "mesh.ep=2: model=gpt has no experts. Type model=moe, or leave mesh.ep out."),
    (
        ("mesh.ep=3", "devices=12", "model=moe"),
        "mesh.ep=3 does not divide model.experts=8. Type mesh.ep=2 or mesh.ep=4.",
    ),
    (("mesh.ep=2", "devices=2", "model=moe", "remat=selective"), "Type remat=full."),
    # pp: a backward in halves
    (
        ("mesh.pp=2", "devices=2", "accumulate=4", "pipeline.schedule=zbv", "remat=full"),
        "remat=full: pipeline.schedule=zbv splits the backward pass and would keep more activations with remat than without. "
        "Type remat=none, or pipeline.schedule=interleaved_1f1b.",
    ),
    # cp: the sequence
    (
        ("mesh.cp=2", "devices=2", "data.sequence=18"),
        "mesh.cp=2: data.sequence=18 is not divisible by 2 x cp = 4. Type data.sequence=20.",
    ),
    (("mesh.cp=2", "devices=2", "model=mlp"), "mesh.cp=2: model=mlp has no sequence to split. Leave mesh.cp out."),
    (
        ("mesh.cp=2", "devices=4", "mesh.tp=2", "context.attention=ulysses", "model.heads=2"),
        "context.attention=ulysses: cp x tp = 4 does not divide model.heads=2. Type context.attention=ring.",
    ),
    # optimizers that need what the model has not
    (("optim=muon", "model=cnn"), "optim=muon: model=cnn has no hidden matrix. Type optim=adamw."),
    # how an axis is used
    (
        ("mesh.tp=2", "devices=2", "tensor.sequence=half"),
        "tensor.sequence is whole or split. Type tensor.sequence=whole.",
    ),
    (("tensor.loss=split",), "tensor.loss=split: the mesh has mesh.tp=1. Type mesh.tp=2, or leave tensor.loss out."),
    (
        ("context.attention=ulysses",),
        "context.attention=ulysses: the mesh has mesh.cp=1. Type mesh.cp=2, or leave context.attention out.",
    ),
]


@pytest.mark.parametrize(("words", "message"), TABLE)
def test_what_does_not_divide_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*SYNTHETIC, *words)
    assert message in str(caught.value)


FOLLOWED = [
    words
    for words, message in TABLE
    if re.search(r"Type (mesh|data|model\.layers|context|optim|remat)", message) and "devices=" in " ".join(words)
]


@pytest.mark.parametrize("words", FOLLOWED, ids=" ".join)
def test_what_is_advised_works(words: tuple[str, ...]) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*SYNTHETIC, *words)
    (problem,) = caught.value.problems
    for alternative in re.findall(r"[a-z_.]+=\w+", problem.partition("Type ")[2]):
        key = alternative.split("=")[0]
        plan(*SYNTHETIC, *(word for word in words if word.split("=")[0] != key), alternative)


def test_every_axis_that_fails_is_told() -> None:
    with pytest.raises(WordsError) as caught:
        plan(*SYNTHETIC, "devices=12", "mesh.tp=3", "mesh.pp=4", "model.layers=3")
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["mesh.tp", "mesh.pp"]


@pytest.mark.parametrize(
    "words",
    [
        ("mesh.tp=2", "devices=2", "tensor.sequence=split", "tensor.loss=split"),
        ("mesh.tp=2", "devices=2", "model=mlp"),
        ("mesh.pp=4", "devices=4"),
        ("mesh.pp=3", "devices=3", "model=cnn"),
        ("mesh.pp=2", "devices=2", "model=mlp", "model.layers=2"),
        ("mesh.pp=2", "devices=2", "model=mlp", "model.layers=3", "pipeline.split=[2,1]"),
        ("mesh.cp=2", "devices=2", "context.attention=ulysses"),
        ("mesh.ep=2", "devices=2", "model=moe"),
        ("mesh.pp=2", "mesh.tp=2", "mesh.cp=2", "devices=8"),
        ("optim=adafactor", "devices=2", "mesh.pp=2"),
        ("optim=adafactor", "devices=2", "mesh.tp=2"),
        ("optim=adafactor", "devices=2", "model=moe", "mesh.ep=2"),
        ("optim=muon", "model=mlp"),
    ],
    ids=" ".join,
)
def test_what_divides_is_accepted(words: tuple[str, ...]) -> None:
    plan(*SYNTHETIC, *words)


def test_a_model_of_the_users_own_is_judged_by_its_ranks() -> None:
    plan(*SYNTHETIC, "model._target_=mine.Model", "trust=[mine]", "objective=next_token", "devices=2", "mesh.tp=2")


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_so_is_a_model_that_is_read_from_where_its_weights_are(axis: str) -> None:
    model = ("model=hf", "model.name=llama", "objective=next_token")
    decided = plan(*SYNTHETIC, *model, f"mesh.{axis}=2", "devices=2")
    assert getattr(decided.mesh, axis) == 2


def test_the_sequence_of_the_data_is_judged_whatever_the_model() -> None:
    own = (*SYNTHETIC, "model._target_=mine.Model", "trust=[mine]", "devices=2", "mesh.cp=2", "data.sequence=18")
    for words in (("objective=next_token",), ("data=text",)):
        with pytest.raises(
            WordsError, match=r"mesh.cp=2: data.sequence=18 is not divisible by 2 x cp = 4. Type data.sequence=20."
        ):
            plan(*own, *words)
    plan(*own, "objective=regression")


def test_the_axes_are_used_as_they_are_asked_to_be() -> None:
    decided = plan(
        *SYNTHETIC, "devices=4", "mesh.tp=2", "mesh.cp=2", "tensor.sequence=split", "context.attention=ulysses"
    )
    assert dict(decided.tensor) == {"sequence": "split", "loss": "whole"}
    assert dict(decided.context) == {"attention": "ulysses"}


ROWS = (
    "data=dataset",
    "data.dataset._target_=torch.utils.data.TensorDataset",
    "trust=[torch]",
    "strategy=ddp",
    "model.vocab=13",
    "objective=next_token",
    "devices=2",
)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("data.length=8", "data.length: rows are not padded. Type data.pad=<the padding token> as well"),
        (
            "data.pad=0 mesh.pp=2",
            "mesh.pp=2 needs rows of one length in every batch. Type data.length=<the longest row>.",
        ),
        ("data.pad=0 mesh.cp=2", "mesh.cp=2 needs rows of one length"),
        (
            "data.pad=0 mesh.cp=2 data.length=10",
            "data.length=10 is not divisible by 4, into which mesh.cp and mesh.tp cut a row. Type data.length=12.",
        ),
        ("data.pad=0 mesh.tp=2 tensor.sequence=split data.length=9", "Type data.length=10."),
        ("data.pad=0 model=moe", "model.balance needs rows of one length"),
        (
            "data.pad=0 data.length=8 mesh.cp=2 data.inputs=[input_ids,attention_mask]",
            "attention_mask of data.inputs masks tokens",
        ),
    ],
)
def test_padded_rows_have_one_length_where_the_mesh_needs_it(words: str, why: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*ROWS, *words.split())
    assert why in str(caught.value)


def test_padded_rows_of_several_lengths_are_taken_where_nothing_cuts_them() -> None:
    assert plan(*ROWS, "data.pad=0").data["pad"] == 0
    assert plan(*ROWS, "data.pad=0", "mesh.pp=2", "data.length=8").data["length"] == 8


FILES = ("data=jsonl", "data.path=a.jsonl", "data.inputs=x", "data.targets=x", "objective=next_token", "model.vocab=16")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("data.packing=pack", "the window is not given. Type data.sequence=<tokens>"),
        ("data.sequence=8", "is the window of packed rows, or the most tokens of a row of text. Type data.packing=pack as well, data.tokenizer=<"),
        ("data.packing=pack data.sequence=8 data.length=8", "data.length=8 is of padded rows"),
        ("data.packing=pack data.sequence=8 model=mlp", "model=mlp takes no tokens, let alone where their documents end"),
        ("data=chat data.tokenizer=tk data.packing=pack data.padding=longest", "data.padding=longest does not go with"),
        ("data=chat data.tokenizer=tk data.packing=pack data.mask=true", "data.mask=true does not go with data.packing=pack"),
        ("data.packing=pack data.sequence=8 data.transform._target_=torch.neg", "rows are packed by the lengths that they have"),
        ("data.packing=pack data.sequence=10 mesh.cp=2 devices=2", "data.sequence=10 is not divisible by 2 x cp = 4"),
    ],
)  # fmt: skip
def test_packed_rows_need_a_window_and_a_model_that_knows_documents(words: str, why: str) -> None:
    with pytest.raises(WordsError) as caught:
        mine = FILES[1:2] if "chat" in words else FILES
        plan(*(word for word in mine if "mlp" not in words or "vocab" not in word), *words.split())
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("data.pad=0 data.packing=pack data.sequence=8", "packed rows fill windows of one length"),
        ("batch=8", "rows are not padded. Type data.pad=<the padding token> as well"),
        ("data.pad=0 data.length=8", "all rows are padded to data.length=8"),
        ("data.pad=0 batch=1", "a batch of one sample has no padding"),
        ("data=chat data.tokenizer=tk", "Type data.padding=longest as well"),
        ("data.pad=0 devices=2 mesh.pp=2", "mesh.pp=2 needs rows of one length"),
    ],
)
def test_samples_are_sorted_by_length_where_that_saves_padding(words: str, why: str) -> None:
    mine = FILES[1:2] if "chat" in words else FILES
    with pytest.raises(WordsError) as caught:
        plan(*mine, *words.split(), "data.bucket=4")
    assert why in str(caught.value)
    assert plan(*FILES, "data.pad=0", "data.bucket=4").data["bucket"] == 4


def test_a_source_of_a_mixture_is_not_sorted_by_length() -> None:
    part = "{data: jsonl, path: a.jsonl, inputs: x, targets: x, pad: 0, length: 8, bucket: 4}"
    with pytest.raises(
        WordsError, match=r"data\.of\.a\.bucket: the batches of a mixture have samples of all its sources"
    ):
        plan("data=mixture", f"data.of={{a: {part}}}", "data.weights={a: 1}", *FILES[4:])


def test_packed_rows_are_of_one_length_for_every_layout() -> None:
    for words in ("mesh.cp=2", "mesh.pp=2", "mesh.tp=2 tensor.sequence=split", "model=moe"):
        made = plan(*FILES, "devices=2", "data.packing=pack", "data.sequence=8", *words.split())
        assert made.data["sequence"] == 8
