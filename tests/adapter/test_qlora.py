"""qlora: computes and differentiates what peft's does beside bitsandbytes' layers, trains the same on two ranks, and leaves dequantised."""

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from adapted import DDP, TARGETS, part, parts_of
from checkpoint.test_base import ADAMW, on, save, sharded, state_on, train
from checkpoint.test_export_adapter import export
from pool import resident
from safetensors.torch import load_file, save_file
from small import agree, few_steps, mesh_of, small_gpt, tokens
from torch import nn

from dtrain.adapter import LowRank, packed
from dtrain.build import build
from dtrain.checkpoint.commit import find
from dtrain.checkpoint.state import TrainState
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.errors import PreflightError, WordsError
from dtrain.launcher import preflight
from dtrain.model import construct
from dtrain.model.adapted import packed as packed_in
from dtrain.model.seeds import fill, fill_added
from dtrain.parallel.order import materialize
from dtrain.predict.state_bytes import count_state
from dtrain.resolve import resolve
from dtrain.tracing.tracer import trace

QLORA = partial(part, "qlora")
one = cache(lambda: few_steps(parts_of("qlora", double=True), {}, steps=20))


def in_4_bits(model: nn.Module, names: list[str], *, double: bool) -> nn.Module:
    """The same model with layers of bitsandbytes, as transformers makes them for load_in_4bit."""
    for name in names:
        plain = model.get_submodule(name)
        assert isinstance(plain, nn.Linear)
        layer = bnb.nn.Linear4bit(plain.in_features, plain.out_features, bias=False, quant_type="nf4")
        data = bnb.nn.Params4bit(
            plain.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=double, module=layer
        )
        layer.weight = data.to("cpu")  # quantizes
        model.set_submodule(name, layer)
    vars(model)["is_loaded_in_4bit"] = True
    return model


@pytest.mark.parametrize("double", [True, False])
def test_outputs_and_gradients_are_those_of_peft_beside_bitsandbytes(double: bool) -> None:
    ours, theirs = small_gpt(tied=False), small_gpt(tied=False)
    build(QLORA(targets=["q", "down", "head"], double=double))(ours)
    fill_added(ours, 1)
    narrow = [name.removesuffix(".weight") for name in packed_in(ours)]
    assert {name.split(".")[-1] for name in narrow} == {*TARGETS, "gate"}, "every one of the blocks, and no head"
    adapted = {name: each for name, each in ours.named_modules() if isinstance(each, LowRank)}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(adapted))
    wrapped = peft.get_peft_model(in_4_bits(theirs, narrow, double=double), config)  # type: ignore[arg-type]
    for name, layer in adapted.items():
        there = wrapped.base_model.model.get_submodule(name)
        with torch.no_grad():
            layer.lora_B.normal_(generator=torch.Generator().manual_seed(2))
            there.lora_A.default.weight.copy_(layer.lora_A)
            there.lora_B.default.weight.copy_(layer.lora_B)
    losses = [model(tokens(2, 6)).square().mean() for model in (ours, wrapped)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for name, layer in adapted.items():
        there = wrapped.base_model.model.get_submodule(name)
        torch.testing.assert_close(layer.lora_A.grad, there.lora_A.default.weight.grad, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(layer.lora_B.grad, there.lora_B.default.weight.grad, rtol=1e-5, atol=1e-7)


def test_it_trains_alike_on_two_ranks() -> None:
    parts = parts_of("qlora", double=True) | {"strategy": DDP}
    run = resident(2, partial(few_steps, parts, {"dp_replicate": 2}, steps=20, microbatch=4))[0]
    agree(run, one(), tolerance=2e-6)
    assert {name.rpartition(".")[2] for name in run["gradients"]} == {"lora_A", "lora_B"}


def numbers(folder: Path, source: str, layout: Any) -> dict[str, list[float]]:
    """What the layers of a new start compute with, from a base or from a checkpoint of the adapter."""
    strategy, degrees = layout
    with mesh_of(**degrees) as mesh:
        state = state_on(mesh, strategy, QLORA(double=True), seed=4)
        sharded(mesh, folder / "adapter").load_weights(source, state)
        if not (folder / "adapter").exists():
            train(state, 2)
            save(sharded(mesh, folder / "adapter"), state)
        added = {name: each.flatten().tolist() for name, each in state.weights().items()}
        return added | {name: layer.unpacked().flatten().tolist() for name, layer in packed_in(state.model).items()}  # type: ignore[attr-defined]


def base(folder: Path, layout: Any) -> dict[str, list[float]]:
    strategy, degrees = layout
    with mesh_of(**degrees) as mesh:
        state = state_on(mesh, strategy, None, seed=1)
        train(state, 2)
        save(sharded(mesh, folder / "base"), state)
    return {}


def test_the_base_is_packed_as_it_is_read_and_no_checkpoint_holds_it(tmp_path: Path) -> None:
    on("fsdp 2", base, tmp_path)
    begun = on("single", numbers, tmp_path, str(tmp_path / "base"))
    assert export(tmp_path, "base", "foreign") == 0
    whole = load_file(tmp_path / "foreign" / "model.safetensors")
    for name in (name for name in begun if name.endswith(".weight") and not name.startswith("model.")):
        data, state = bnb.functional.quantize_4bit(
            whole[name], blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        assert torch.equal(torch.tensor(begun[name]), bnb.functional.dequantize_4bit(data, state).flatten())
    _, commit = find(str(tmp_path / "adapter"))
    assert {name.rpartition(".")[2] for name in commit["tensors"] if name.startswith("model.")} == {"lora_A", "lora_B"}
    again = on("ddp 2", numbers, tmp_path, str(tmp_path / "adapter"))
    assert again.keys() == begun.keys() and all(again[name] == begun[name] for name in packed_in_names(begun))


def packed_in_names(values: dict[str, list[float]]) -> list[str]:
    return [name for name in values if name.endswith(".weight")]


def test_merged_it_is_the_dequantised_base_with_the_adapter(tmp_path: Path) -> None:
    model = small_gpt(tied=False)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with mesh_of(dp_shard=1) as mesh:
        tuned = small_gpt(tied=False)
        build(QLORA(targets=["q"], double=True))(tuned)
        fill_added(tuned, 1)
        state = TrainState(tuned, build(ADAMW, model=tuned))
        sharded(mesh, tmp_path / "adapter").load_weights(str(tmp_path / "model.safetensors"), state)
        train(state, 2)
        save(sharded(mesh, tmp_path / "adapter"), state)
    assert export(tmp_path, "adapter", "one", "adapter=merged") == 0
    assert export(tmp_path, "adapter", "half", "adapter=merged", "dtype=bf16") == 0
    assert export(tmp_path, "adapter", "peft", "adapter=peft") == 0
    merged, half = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "half"))
    plain = small_gpt(tied=False)
    for name, layer in packed_in(tuned).items():
        plain.get_parameter(name).data = layer.unpacked()  # type: ignore[attr-defined]
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "peft"))  # type: ignore[arg-type]
    there = theirs.merge_and_unload().state_dict()
    assert merged.keys() == there.keys() and all(torch.equal(merged[name], there[name]) for name in merged)
    assert all(torch.equal(half[name], there[name].bfloat16()) for name in half)


WORDS = (
    "data=synthetic", "data.task=next_token", "objective=next_token", "data.sequence=16", "data.vocab=64", "model.layers=2", "model.heads=2",
    "model.width=64", "batch=4", "init=base", "adapter=qlora",
)  # fmt: skip


@pytest.mark.parametrize("double", [True, False])
def test_the_plan_counts_what_it_holds(double: bool) -> None:
    plan = resolve(compose([*WORDS, f"adapter.double={double}", "strategy=single"]), Cluster(gpus=0, cpus=1))
    shapes, _ = trace(plan)
    model = construct(plan.model, facts={"vocab": 64}, seed=0, adapter=plan.adapter)
    materialize(model, torch.device("cpu"))
    fill(model, 0)
    fill_added(model, 0)
    held = sum(each.nbytes for each in model.parameters() if not each.is_meta)
    blocks = sum(layer.packed.nbytes + layer.scales.nbytes for layer in packed_in(model).values())  # type: ignore[attr-defined]
    predicted = count_state(plan, shapes.blocks)
    assert held + blocks <= predicted.parameters <= 1.01 * (held + blocks)
    assert predicted.gradients == sum(each.nbytes for each in model.parameters() if each.requires_grad)


@pytest.mark.parametrize("words", [["strategy=fsdp"], ["strategy=ddp", "mesh.tp=2"], ["strategy=zero2"]])
def test_a_mesh_that_splits_the_base_is_refused_before_the_launch(words: list[str]) -> None:
    with pytest.raises(WordsError, match=r"adapter=qlora holds the packed base whole on every rank. Type strategy=ddp"):
        resolve(compose([*WORDS, *words, "devices=2"]), Cluster(gpus=0, cpus=2))
    assert resolve(compose([*WORDS, "devices=2"]), Cluster(gpus=0, cpus=2)).mesh.dp_replicate == 2


def test_without_the_package_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    plan = resolve(compose([*WORDS, "strategy=single"]), Cluster(gpus=0, cpus=1))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert any("needs the bitsandbytes package" in each for each in preflight._packages(plan))
    with pytest.raises(PreflightError, match=r"needs the bitsandbytes package. Type: pip install 'dtrain\[qlora\]'"):
        packed.library()
