"""A loss that the model computes itself is trained on, added with a weight, or refused: it is never dropped."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from invariance.run import run, worst
from pool import RankFailed
from small import CPUS, plan
from torch import Tensor

from dtrain.build import build
from dtrain.compose import compose
from dtrain.data.stream import Stream, as_source
from dtrain.errors import WordsError
from dtrain.model import construct
from dtrain.model.seeds import derive
from dtrain.objective import logits_of
from dtrain.objective.own import Own
from dtrain.planned import BatchShape
from dtrain.resolve import resolve

LABELS = "data=dataset data.dataset._target_=invariance.zoo.Labels data.inputs=[input_ids] data.targets=labels data.holdout=0 trust=[invariance]"
MIXTRAL = f"model._target_=invariance.zoo.mixtral {LABELS}"
LLAMA = f"model._target_=invariance.zoo.llama {LABELS}"
ROUTED = "objective=next_token data.shift=true objective.losses.aux_loss=0.02"
OWN = "objective=own objective.over=next_tokens"


def by_hand(words: str) -> float:
    """What the model's own `loss` is for the first batch of the run, in one forward."""
    decided = plan(*words.split(), "batch=8", "schedule=constant", "logger=[]", "hook=[]")
    source = as_source(build(decided.data))
    mesh = SimpleNamespace(
        device=torch.device("cpu"), data_rank=0, data_ranks=1, batch_ranks=1, sum=lambda tensor: tensor
    )
    stream = Stream(
        source, batch=BatchShape(8, 8, 1, 1), mesh=mesh, seed=derive(decided.seed, "data"), count=lambda batch: 1
    )  # type: ignore[arg-type]
    (batch,) = next(stream).microbatches
    model = construct(decided.model, facts=source.facts, seed=derive(decided.seed, "model"))
    loss: Tensor = model(**batch["inputs"], labels=batch["targets"]).loss
    return loss.item()


@pytest.fixture(autouse=True)
def _transformers() -> None:
    pytest.importorskip("transformers")


def test_the_first_loss_is_that_of_the_models_own_trainer() -> None:
    expected = by_hand(f"{MIXTRAL} {OWN}")
    own = run(MIXTRAL, f"{OWN} devices=1", steps=1)["losses"][0]
    added = run(MIXTRAL, "objective=next_token data.shift=true objective.losses.aux_loss=0.001 devices=1", steps=1)[
        "losses"
    ][0]
    left = run(MIXTRAL, "objective=next_token data.shift=true objective.losses.aux_loss=0 devices=1", steps=1)[
        "losses"
    ][0]
    assert abs(own - expected) < 2e-6 and abs(added - expected) < 2e-6, "mixtral's router_aux_loss_coef is 0.001"
    assert added - left > 1e-3, "and it is not nothing"


@pytest.mark.often("objective=next_token*-strategy=fsdp*", "objective=own*-strategy=zero1*")
@pytest.mark.parametrize("words", ["strategy=ddp devices=2", "strategy=fsdp devices=2", "strategy=zero1 devices=2"])
@pytest.mark.parametrize("objective", [ROUTED, OWN])
def test_a_routers_loss_is_the_same_on_every_mesh_with_that_microbatch(objective: str, words: str) -> None:
    together = f"{objective} objective.together=2"
    differences = worst(run(MIXTRAL, f"{together} {words}", steps=3), run(MIXTRAL, f"{together} devices=1", steps=3))
    assert differences["losses"] < 2e-6 and differences["gradients"] < 2e-6 and differences["weights"] < 1e-4, (
        differences
    )


@pytest.mark.parametrize(
    "words",
    [
        "strategy=ddp devices=2 microbatch=2",
        "strategy=fsdp devices=2",
        "strategy=pipeline devices=2 microbatch=2",
        "strategy=ddp mesh.cp=2 devices=2",
        "mesh.tp=2 devices=2 tensor.loss=split",
    ],
)
def test_shifted_targets_give_the_loss_of_hugging_face_on_every_mesh(words: str) -> None:
    objective = "objective=next_token data.shift=true"
    here, there = run(LLAMA, f"{objective} {words}", steps=2), run(LLAMA, f"{objective} devices=1", steps=2)
    assert abs(there["losses"][0] - by_hand(f"{LLAMA} {OWN}")) < 2e-6
    differences = worst(here, there)
    assert differences["losses"] < 2e-6 and differences["gradients"] < 2e-6, differences


def test_targets_that_are_the_inputs_are_refused_with_the_word_that_shifts() -> None:
    with pytest.raises(
        RankFailed,
        match=r"objective=next_token: the targets of the first samples equal their inputs.*Type data\.shift=true",
    ):
        run(LLAMA, "objective=next_token devices=1", steps=1)


def test_a_routers_loss_that_nobody_asked_for_is_refused_at_the_first_forward() -> None:
    with pytest.raises(
        RankFailed, match=r"it returns `aux_loss`, which would be dropped\. Type objective\.losses\.aux_loss=<weight>"
    ):
        run(MIXTRAL, "objective=next_token data.shift=true devices=1", steps=1)
    run(f"{MIXTRAL} model.router=false", "objective=next_token data.shift=true devices=1", steps=1)


def test_a_weight_for_a_loss_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        RankFailed, match=r"objective\.losses\.aux_loss=0\.02: the model returns no number called aux_loss"
    ):
        run(f"{MIXTRAL} model.router=false", f"{ROUTED} devices=1", steps=1)


def test_a_model_may_return_its_loss_alone() -> None:
    model = "model._target_=invariance.zoo.Judge data=synthetic data.task=classification trust=[invariance]"
    objective = "objective=own objective.labels=y objective.together=2"
    differences = worst(
        run(model, f"{objective} strategy=ddp devices=2", steps=3), run(model, f"{objective} devices=1", steps=3)
    )
    assert differences["losses"] < 2e-6, differences


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            f"{ROUTED} devices=2",
            r"objective\.losses\.aux_loss=0\.02: .* sees 4 of 8 samples together\. Type objective\.together=4",
        ),
        (f"{ROUTED} microbatch=2", r"sees 2 of 8 samples together\. Type objective\.together=2"),
        (f"{ROUTED} objective.together=4 microbatch=2", r"sees 2 samples together, not 4"),
        (f"{ROUTED} mesh.cp=2 devices=2", r"mesh\.cp=2 splits them"),
        (f"{OWN} mesh.pp=2 devices=2", r"objective=own: .* mesh\.pp=2 splits them"),
        (f"{OWN} mesh.tp=2 devices=2 tensor.loss=split", r"tensor\.loss=split no rank has the full logits"),
        (
            f"{OWN} data.pad=0 objective.together=2 devices=2",
            r"data\.pad=0: rows are filled up .* objective=own may depend on it\. Type data\.length=<the longest row>",
        ),
        (f"{ROUTED} data.pad=0 data.workers=2", r"data\.pad=0: .* objective\.losses\.aux_loss=0\.02 may depend on it"),
        ("objective=next_token objective.together=2", r"objective\.together=2: nothing in this run reads it"),
        ("objective=classification data.shift=true", r"data\.shift=true makes the next token the target"),
    ],
)
def test_what_cannot_be_the_same_on_every_mesh_is_refused_before_launch(words: str, sentence: str) -> None:
    with pytest.raises(WordsError, match=sentence):
        resolve(compose([*MIXTRAL.split(), "batch=8", *words.split()]), CPUS)


@pytest.mark.parametrize(
    "words",
    [
        f"{OWN} data.pad=0 objective.together=2 data.length=16 devices=2",
        f"{OWN} data.pad=0",
        "objective=next_token data.pad=0 devices=2",
    ],
)
def test_rows_that_are_padded_alike_on_every_mesh_are_taken(words: str) -> None:
    resolve(compose([*MIXTRAL.split(), "batch=8", *words.split()]), CPUS)


def test_labels_that_would_be_shifted_twice_are_refused() -> None:
    with pytest.raises(
        WordsError,
        match=r"objective\.over=next_tokens: the model shifts its labels, and data=text gives the next token",
    ):
        resolve(compose(["model._target_=invariance.zoo.llama", "trust=[invariance]", "data=text", *OWN.split()]), CPUS)
    with pytest.raises(RankFailed, match=r"the targets are the next tokens already\. Leave out data\.shift"):
        run(
            LLAMA.replace("zoo.Labels data.inputs=[input_ids] data.targets=labels", "zoo.Uneven data.inputs=[0]"),
            f"{OWN} devices=1",
            steps=1,
        )
    with pytest.raises(
        RankFailed, match=r"causal models of Hugging Face shift their labels\. Type objective\.over=next_tokens"
    ):
        run(LLAMA, "objective=own devices=1", steps=1)


@pytest.mark.parametrize(
    "outputs", [{"logits": torch.zeros(1), "loss": None}, SimpleNamespace(logits=torch.zeros(1), aux_loss=None)]
)
def test_a_loss_that_is_none_is_none(outputs: Mapping[str, Any]) -> None:
    assert logits_of(outputs).shape == (1,)


@pytest.mark.parametrize("name", ["loss", "aux_loss", "commitment_loss"])
def test_a_loss_with_a_gradient_is_never_dropped(name: str) -> None:
    loss = torch.ones((), requires_grad=True) * 2
    for outputs in ({"logits": torch.zeros(1), name: loss}, SimpleNamespace(logits=torch.zeros(1), **{name: loss})):
        with pytest.raises(WordsError, match=name):
            logits_of(outputs)
        assert logits_of(outputs, {name}).shape == (1,)
        with torch.no_grad():
            assert logits_of(outputs).shape == (1,), "who only looks drops nothing"
    assert logits_of({"logits": torch.zeros(1), name: loss.detach()}).shape == (1,), "a number to be shown"


def test_the_mean_of_a_microbatch_weighs_as_much_as_it_counts() -> None:
    targets = torch.tensor([[5, -100, 2], [-100, -100, 3]])
    batch = {"inputs": torch.zeros(2, 3), "targets": targets}
    for over, count in (("targets", 3), ("next_tokens", 2), ("samples", 2)):
        objective = Own(over=over)  # type: ignore[arg-type]
        assert objective.count(batch) == count
        assert objective.loss({"loss": torch.tensor(0.5)}, batch).sum.item() == count * 0.5
    with pytest.raises(
        WordsError, match="objective=own: the model was called with labels, but returns a dict without a `loss`"
    ):
        Own().loss({"logits": targets}, batch)
