"""Tensor parallelism: matrices split as the table of the model says, and the numbers of one process."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from pool import resident
from small import PARTS, STRATEGIES, agree, few_steps, on_resident_mesh, small_gpt, tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.parallel import tensor

UNTIED = PARTS | {"model": PARTS["model"] | {"tied": False}}
WHOLE = {"sequence": "whole", "loss": "whole"}


@pytest.mark.often("whole-split", "split-whole")
@pytest.mark.parametrize("loss", ["whole", "split"])
@pytest.mark.parametrize("sequence", ["whole", "split"])
def test_two_ranks_are_one_process(sequence: str, loss: str) -> None:
    (reference,) = resident(1, partial(few_steps, UNTIED, {}, steps=2))
    parts = UNTIED | {"strategy": STRATEGIES["ddp"]}
    for run in resident(2, partial(few_steps, parts, {"tp": 2}, steps=2, tensors={"sequence": sequence, "loss": loss})):
        agree(run, reference)


def test_a_tied_weight_is_split_once() -> None:
    """And so are shards of what is split."""
    (reference,) = resident(1, partial(few_steps, PARTS, {}, steps=2))
    for strategy in ("ddp", "fsdp"):
        agree(
            resident(2, partial(few_steps, PARTS | {"strategy": STRATEGIES[strategy]}, {"tp": 2}, steps=2))[0],
            reference,
        )


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_whose_table_depends_on_its_size(layers: int) -> None:
    parts = PARTS | {
        "model": {"_target_": "dtrain.model.mlp.MLP", "inputs": "auto", "outputs": "auto", "width": 6, "layers": layers}
    }
    parts |= {
        "data": PARTS["data"] | {"task": "regression"},
        "objective": {"_target_": "dtrain.objective.regression.Regression"},
    }
    (reference,) = resident(1, partial(few_steps, parts, {}, steps=2))
    agree(resident(2, partial(few_steps, parts | {"strategy": STRATEGIES["ddp"]}, {"tp": 2}, steps=2))[0], reference)


# what lies where


def placements(mesh: Mesh, options: dict[str, str]) -> dict[str, Any]:
    model = small_gpt(layers=1)
    tensor.apply(model, mesh.axis("tp"), **options)
    return {
        name: (list(p.placements), list(p.to_local().shape)) if isinstance(p, DTensor) else None
        for name, p in model.named_parameters()
    }


def test_a_rank_holds_its_part_of_every_matrix() -> None:
    for sequence in ("whole", "split"):
        for first, second in [
            on_resident_mesh(partial(placements, options={"sequence": sequence, "loss": "whole"}), tp=2)
        ]:
            assert first["embed.weight"] == ([Shard(0)], [7, 8]) and second["embed.weight"] == ([Shard(0)], [6, 8]), (
                "13 words on two ranks"
            )
            for name in ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"):
                assert first[f"blocks.0.{name}.weight"][0] == [Shard(0)], name
            for name in ("attention.out", "feed_forward.down"):
                assert first[f"blocks.0.{name}.weight"][0] == [Shard(1)], name
            assert first["norm.weight"] == (None if sequence == "whole" else ([Replicate()], [8]))


def between(mesh: Mesh, options: dict[str, str]) -> tuple[list[int], list[int], type[Tensor]]:
    model = small_gpt(layers=2)
    tensor.apply(model, mesh.axis("tp"), **options)
    seen: list[list[int]] = []
    model.blocks[1].register_forward_pre_hook(
        lambda module, args: seen.append(
            list(args[0].to_local().shape if isinstance(args[0], DTensor) else args[0].shape)
        )
    )
    logits = model(tokens(2, 6))
    return seen[0], list(logits.to_local().shape if isinstance(logits, DTensor) else logits.shape), type(logits)


def test_what_lies_between_the_matrices_is_split_along_the_sequence() -> None:
    for residual, _, _ in on_resident_mesh(partial(between, options={"sequence": "split", "loss": "whole"}), tp=2):
        assert residual == [2, 3, 8]
    for residual, _, _ in on_resident_mesh(partial(between, options=WHOLE), tp=2):
        assert residual == [2, 6, 8]


def test_logits_stay_split_over_the_vocabulary_where_asked() -> None:
    first, second = on_resident_mesh(partial(between, options={"sequence": "whole", "loss": "split"}), tp=2)
    assert (first[1], second[1]) == ([2, 6, 7], [2, 6, 6])
    assert first[2] is DTensor
    assert on_resident_mesh(partial(between, options=WHOLE), tp=2)[0][1:] == ([2, 6, 13], Tensor)


# tables of other models


class Attention(nn.Module):
    """With norms inside of each head, in the manner of Hugging Face."""

    def __init__(self, norms: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.q_norm, self.k_norm = norms(4), norms(4)
        self.o_proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (project(x).view(B, T, -1, 4) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Foreign(nn.Module):
    _tp_plan: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.q_proj": "colwise",
        "model.layers.*.k_proj": "colwise",
        "model.layers.*.v_proj": "colwise",
        "model.layers.*.q_norm": "replicated_with_grad_allreduce",
        "model.layers.*.k_norm": "replicated_with_grad_allreduce",
        "model.layers.*.o_proj": "rowwise",
        "lm_head": "colwise_rep",
    }

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(13, 8)
        self.model.layers = nn.ModuleList([Attention(), Attention()])
        self.lm_head = nn.Linear(8, 13)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = x + layer(x)
        logits: Tensor = self.lm_head(x)
        return logits


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What comes out, and what this rank has of each gradient: all of it where the weight is whole."""
    out = model(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    values = {"": out.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        if isinstance(gradient, DTensor):
            whole = all(isinstance(place, Replicate) for place in gradient.placements)
            gradient = gradient.to_local() if whole else gradient.full_tensor()
        values[name] = gradient
    return values


def split_outcome(mesh: Mesh, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    tensor.apply(model, mesh.axis("tp"), **WHOLE)
    return outcome(model, x)


def assert_same(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            values[name],
            value,
            rtol=0,
            atol=2e-6 * max(1.0, value.abs().max().item()),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_the_plan_of_a_hugging_face_model_is_a_table_too() -> None:
    """Every gradient, also that of a norm inside of each head: its weight is whole and its heads are on two ranks."""
    expected = outcome(Foreign(), tokens(2, 6))
    for values in on_resident_mesh(partial(split_outcome, model=Foreign(), x=tokens(2, 6)), tp=2):
        assert_same(values, expected)


class Styled(nn.Module):
    """One layer after the other, split as it is told."""

    def __init__(self, *styles: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in styles])
        self.tp_plan = {f"layers.{index}": style for index, style in enumerate(styles)}
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "styles",
    [("colwise", "rowwise"), ("colwise_rep",), ("colwise_gather_output", "rowwise_split_input"), ("replicate", "colwise", "rowwise"),
     ("sequence_parallel", "rowwise_split_input")],
    ids="+".join,
)  # fmt: skip
def test_every_style_gives_the_numbers_of_one_rank(styles: tuple[str, ...]) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(9))
    expected = outcome(Styled(*styles), x)
    for values in on_resident_mesh(partial(split_outcome, model=Styled(*styles), x=x), tp=2):
        assert_same(values, expected)


class Normed(nn.Module):
    """A norm over all heads at once."""

    tp_plan: ClassVar[Mapping[str, str]] = {"up": "colwise", "norm": "replicated_with_grad_allreduce"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.up(x))
        return out


class Twice(nn.Module):
    """One weight in two places that the table splits differently."""

    tp_plan: ClassVar[Mapping[str, str]] = {"first": "colwise", "second": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


class GoesOn(nn.Module):
    """Computes with what its table gathers, as no head does."""

    tp_plan: ClassVar = {"up": "colwise_gather_output"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.up(x))
        return out


def refusal(mesh: Mesh, model: nn.Module, options: dict[str, str]) -> str:
    with pytest.raises(WordsError) as caught:
        tensor.apply(model, mesh.axis("tp"), **options)
        model(torch.ones(2, 3, 4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            nn.Linear(2, 2),
            WHOLE,
            "mesh.tp=2: Linear has no tensor-parallel plan. Give the class a table such as tp_plan =",
        ),
        (
            Styled("colwise", "diagonal"),
            WHOLE,
            "layers.1 has the style diagonal. Allowed: colwise, colwise_gather_output",
        ),
        (Styled("replicate"), WHOLE, "the tp_plan of Styled names none of its modules (layers.0)"),
        (
            Styled("colwise"),
            {"sequence": "split", "loss": "whole"},
            "the tp_plan of Styled does not say which modules are sequence_parallel",
        ),
        (Twice(), WHOLE, "Linear and Linear are one weight, which tp_plan splits in two ways"),
        (
            GoesOn(),
            {"sequence": "whole", "loss": "split"},
            "tensor.loss=split: GoesOn computes with the outputs that its tp_plan gathers, but this key leaves them split. Leave out tensor.loss.",
        ),
        (Normed(), WHOLE, "RMSNorm normalises all heads together ([2, 3, 2]), which tensor parallelism splits"),
    ],
    ids=["no table", "style", "no module", "sequence", "tied", "logits", "norm"],
)
def test_what_cannot_be_split_is_refused_by_name(model: nn.Module, options: dict[str, str], message: str) -> None:
    for sentence in on_resident_mesh(partial(refusal, model=model, options=options), tp=2):
        assert message in sentence


class Borrows(nn.Module):
    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x)) + F.linear(x, self.up.weight)
        return out


def borrowed(mesh: Mesh) -> str:
    model = Borrows()
    tensor.apply(model, mesh.axis("tp"), **WHOLE)
    model.register_forward_hook(
        lambda *_: None, always_call=True
    )  # as FSDP2's: torch goes on through these when one has ended the forward
    with pytest.raises(WordsError) as error:
        model(torch.ones(2, 4))
    return str(error.value)


def test_a_split_weight_that_is_used_outside_of_its_module_is_named() -> None:
    for message in on_resident_mesh(borrowed, tp=2):
        assert message.startswith("mesh.tp: up.weight is split, but Borrows uses it outside of its own module")
