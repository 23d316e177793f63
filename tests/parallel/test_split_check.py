"""A model that looks along a split sequence is named before its first step; those that only attend go through, in every precision."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import PARTS, on_mesh, on_resident_mesh, small_gpt, tokens
from torch import Tensor, nn

from dtrain.build import build
from dtrain.data.stream import as_source
from dtrain.errors import WordsError
from dtrain.evaluation.heldout import evaluate
from dtrain.loop.step import check
from dtrain.mesh import Mesh
from dtrain.objective.next_token import NextToken
from dtrain.parallel.context import context_of
from dtrain.parallel.huggingface import adapt
from dtrain.parallel.order import lower, parallelize
from dtrain.planned import PipelineShape
from dtrain.precision import Precision, bf16, bf16_true, fp16, fp32
from dtrain.strategy.ddp import DDP
from dtrain.strategy.fsdp import FSDP

C = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x_BTC).chunk(3, -1))
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out


class Net(nn.Module):
    """Embedding, attention, `mixer`, head; `positions` gives what is added for (tokens, position_ids)."""

    def __init__(self, mixer: Callable[[], nn.Module] = nn.Identity, positions: str = "ids") -> None:
        super().__init__()
        self.embed, self.where, self.attention, self.mixer, self.head = (
            nn.Embedding(13, C),
            nn.Embedding(400, C),
            Attention(),
            mixer(),
            nn.Linear(C, 13),
        )
        self.positions = positions

    def forward(self, x_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
        count = torch.arange(x_BT.shape[1])[None]
        ids = count if self.positions == "counted" or position_ids is None else position_ids
        x = self.embed(x_BT)
        x = x + self.where(ids)
        x = x + self.attention(x)
        x = x + self.mixer(x)
        out: Tensor = self.head(x)
        return out


class Mixer(nn.Module):
    """`mix(self, x [B, T, C])`, with one submodule."""

    def __init__(self, mix: Callable[[Any, Tensor], Tensor], inner: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.mix, self.inner = mix, inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, x)


def by_hand(self: Any, x: Tensor) -> Tensor:
    scores = (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ x


def norm_over_time(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.inner(x.mT).mT
    return out


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "causal convolution": (lambda: Net(lambda: Mixer(lambda m, x: m.inner(x.mT)[..., : x.shape[1]].mT, lambda: nn.Conv1d(C, C, 3, padding=2))), "mixer.inner (Conv1d)"),
    "convolution": (lambda: Net(lambda: Mixer(norm_over_time, lambda: nn.Conv1d(C, C, 3, padding=1, groups=C))), "mixer.inner (Conv1d)"),
    "padded before": (lambda: Net(lambda: Mixer(lambda m, x: m.inner(F.pad(x.mT, (2, 0))).mT, lambda: nn.Conv1d(C, C, 3))), "mixer"),
    "recurrence": (lambda: Net(lambda: Mixer(lambda m, x: m.inner(x)[0], lambda: nn.GRU(C, C, batch_first=True))), "mixer.inner (GRU)"),
    "norm over time": (lambda: Net(lambda: Mixer(norm_over_time, lambda: nn.InstanceNorm1d(C))), "mixer.inner (InstanceNorm1d)"),
    "token shift": (lambda: Net(lambda: Mixer(lambda m, x: x.roll(1, 1))), "mixer (Mixer)"),
    "token shift, then a layer": (lambda: Net(lambda: Mixer(lambda m, x: m.inner(x.roll(1, 1)), lambda: nn.Linear(C, C))), "mixer (Mixer)"),
    "running sum": (lambda: Net(lambda: Mixer(lambda m, x: x.cumsum(1) / 8)), "mixer (Mixer)"),
    "gate by the mean": (lambda: Net(lambda: Mixer(lambda m, x: x * m.inner(x.mT).mT.sigmoid(), lambda: nn.AdaptiveAvgPool1d(1))), "mixer.inner (AdaptiveAvgPool1d)"),
    "the last token": (lambda: Net(lambda: Mixer(lambda m, x: x * x[:, -1:])), "mixer (Mixer)"),
    "attention by hand": (lambda: Net(lambda: Mixer(by_hand)), "mixer (Mixer)"),
    "a layer over all tokens": (lambda: Net(lambda: Mixer(norm_over_time, lambda: nn.Linear(48, 48))), "mixer.inner (Linear) fails on a part of a sequence"),
    "positions of one length": (lambda: Net(lambda: Mixer(lambda m, x: x + m.inner.weight, lambda: nn.Embedding(48, C))), "mixer (Mixer) fails on a part of a sequence"),
    "counted positions": (lambda: Net(positions="counted"), "the model (Net)"),
}  # fmt: skip


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


class Twice(nn.Module):
    """Statistics that nothing uses, a layer that is called twice, tokens in one row, and time first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pool = nn.Linear(C, C), nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Tensor) -> Tensor:
        self.pool(x.mT)
        x = self.layer(self.layer(x).flatten(0, 1)).view_as(x)
        out: Tensor = self.layer(x.transpose(0, 1).flatten(0, 1)).view(x.shape[1], x.shape[0], C).transpose(0, 1)
        return out


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: small_gpt(heads=4, width=16, kv_heads=2),
    "positions from ids": Net,
    "a convolution over channels": lambda: Net(lambda: Mixer(norm_over_time, lambda: nn.Conv1d(C, C, 1))),
    "dropout": lambda: Net(lambda: nn.Dropout(0.5)),
    "noise": lambda: Net(Noise),
    "unused, twice, flat": lambda: Net(Twice),
    "torch's encoder layer": lambda: Net(lambda: nn.TransformerEncoderLayer(C, 4, C, batch_first=True)),
}


def said(
    mesh: Mesh, model: nn.Module, method: str = "ring", precision: Precision | None = None, T: int = 24, rows: int = 3
) -> str:
    """The sentence, or nothing."""
    precision = precision or fp32.build()
    if precision.param != torch.float32:
        lower(model, precision.param)
    context = context_of(mesh, method)  # type: ignore[arg-type]
    assert context
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [(module.training, len(module._forward_hooks)) for module in model.modules()]
    try:
        check(model, NextToken(), {"inputs": tokens(rows, T), "targets": tokens(rows, T)}, context, mesh, precision)
    except WordsError as error:
        return str(error)
    assert context.checked
    assert modes == [(module.training, len(module._forward_hooks)) for module in model.modules()]
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    return ""


def every(mesh: Mesh, models: dict[str, Callable[[], nn.Module]], **options: Any) -> dict[str, str]:
    def answers() -> Iterator[tuple[str, str]]:
        for name, make in models.items():
            torch.manual_seed(0)
            yield name, said(mesh, make(), **options)

    return dict(answers())


def wrong(mesh: Mesh, method: str) -> dict[str, str]:
    return every(mesh, {name: make for name, (make, _) in WRONG.items()}, method=method, T=48)


@pytest.mark.parametrize(("method", "cp"), [("ring", 2), ("ulysses", 2), ("ring", 4)])
def test_what_looks_along_the_sequence_is_named(method: str, cp: int) -> None:
    for sentences in on_resident_mesh(partial(wrong, method=method), cp=cp):
        for name, (_, culprit) in WRONG.items():
            assert f"mesh.cp={cp}: {culprit}" in sentences[name], (name, sentences[name])
            assert "Type mesh.cp=1" in sentences[name]


def test_a_model_of_one_length_is_refused_and_a_mistake_of_its_own_is_not() -> None:
    """Of more tokens than the check looks at, the first are a part already."""

    def work(mesh: Mesh) -> str:
        fixed, broken = (
            Net(lambda size=size: Mixer(lambda m, x: x + m.inner.weight, lambda: nn.Embedding(size, C)))
            for size in (400, 7)
        )
        with pytest.raises(RuntimeError, match=r"\(400\) must match the size of tensor b \(7\)"):
            said(mesh, broken, T=400)
        return said(mesh, fixed, T=400)

    assert all(
        "the model fails on a part of a sequence: The size of tensor a (256)" in sentence
        for sentence in on_mesh(work, cp=2)
    )


def right(mesh: Mesh, method: str) -> list[dict[str, str]]:
    kinds = [fp32.build(), bf16.build(), bf16_true.build(), fp16.build(scale=1.0, growth=10)]
    return [every(mesh, RIGHT, method=method, precision=precision, T=T) for precision in kinds for T in (8, 400)]


@pytest.mark.often("ring")
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_what_only_attends_goes_through_in_every_precision(method: str) -> None:
    for runs in on_resident_mesh(partial(right, method=method), cp=2):
        for sentences in runs:
            assert not {name: sentence for name, sentence in sentences.items() if sentence}


def convolved(mesh: Mesh) -> list[str]:
    torch.manual_seed(0)
    make, _ = WRONG["causal convolution"]
    return [said(mesh, make(), precision=precision) for precision in (bf16.build(), bf16_true.build())]


def test_the_low_precisions_see_a_convolution_too() -> None:
    for sentences in on_resident_mesh(convolved, cp=2):
        assert all("mixer.inner (Conv1d)" in sentence for sentence in sentences)


def hugging_face(kind: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {
        "vocab_size": 13,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    }
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**common | sizes)
    )
    adapt(model)
    return model


def test_of_hugging_face_attention_goes_through_and_other_mixers_are_named() -> None:
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    models = {
        "Llama": hugging_face("Llama"),
        "Mixtral": hugging_face("Mixtral", num_local_experts=4),
        "Lfm2": hugging_face("Lfm2", layer_types=["conv", "full_attention"]),
        "FalconH1": hugging_face("FalconH1", **mamba),
    }

    def work(mesh: Mesh) -> list[dict[str, str]]:
        made = {name: partial(deepcopy, model) for name, model in models.items()}
        return [every(mesh, made, precision=precision) for precision in (fp32.build(), bf16.build())]

    for runs in on_mesh(work, cp=2):
        for sentences in runs:
            assert sentences["Llama"] == sentences["Mixtral"] == ""
            assert "mesh.cp=2: model.layers.0.conv (Lfm2ShortConv)" in sentences["Lfm2"]
            assert "mesh.cp=2: model.layers.0.mamba (FalconH1Mixer)" in sentences["FalconH1"]


@pytest.mark.often("{'cp': 2, 'tp': 2}")
@pytest.mark.parametrize("degrees", [{"cp": 2, "dp_shard": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}], ids=str)
def test_beside_other_axes_the_model_of_the_house_goes_through(degrees: dict[str, int]) -> None:
    """And a module that looks along the sequence is named as in the user's own model, on all ranks alike."""

    def work(mesh: Mesh) -> tuple[str, str]:
        sentences = []
        for broken in (False, True):
            model = small_gpt(heads=4, width=16, kv_heads=2)
            if broken:
                model.blocks[1].feed_forward.register_forward_hook(lambda module, args, out: out + out.roll(1, 1))
            strategy = FSDP(reshard="forward", offload="none") if "dp_shard" in degrees else DDP(bucket_mb=25)
            shape = PipelineShape("gpipe") if "pp" in degrees else None
            tensors = {"sequence": "whole", "loss": "split"}
            sentences.append(
                said(
                    mesh,
                    parallelize(model, mesh, strategy, precision=fp32.build(), seed=0, pipeline=shape, tensors=tensors),
                    rows=2,
                )
            )
        return sentences[0], sentences[1]

    answers = on_mesh(work, **degrees)
    assert {good for good, _ in answers} == {""}
    assert all("blocks.1.feed_forward" in bad for _, bad in answers)


def test_what_is_evaluated_is_held_against_the_whole_too() -> None:
    def work(mesh: Mesh) -> None:
        context = context_of(mesh, "ring")
        model = WRONG["causal convolution"][0]()
        evaluate(
            model,
            as_source(build(PARTS["data"] | {"sequence": 12})),
            NextToken(),
            mesh,
            precision=fp32.build(),
            samples=4,
            microbatch=2,
            context=context,
        )

    with pytest.raises(AssertionError, match=r"mixer.inner \(Conv1d\)"):
        on_mesh(work, cp=2)
