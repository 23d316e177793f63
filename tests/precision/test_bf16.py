"""bfloat16 products over fp32 weights: near fp32, the same on every mesh within what bfloat16 keeps."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import resident
from small import PARTS, STRATEGIES, few_steps, on_resident_mesh, plan, tokens
from torch import Tensor, nn

from dtrain.build import build as make
from dtrain.mesh import Mesh
from dtrain.model import blocks, construct
from dtrain.model.gpt import Embedding, RMSNorm
from dtrain.parallel.order import parallelize
from dtrain.precision.bf16 import build
from dtrain.train import train

BF16 = PARTS | {"precision": {"_target_": "dtrain.precision.bf16.build"}}


def test_weights_and_gradients_stay_whole() -> None:
    layer, precision = torch.nn.Linear(4, 4), build()
    with precision.autocast(torch.device("cpu")):
        outputs = layer(torch.ones(2, 4))
    assert outputs.dtype == torch.bfloat16
    outputs.sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_the_loss_is_near_that_of_fp32_and_falls_with_it() -> None:
    (full,), (half,) = resident(1, few_steps, PARTS, {}), resident(1, few_steps, BF16, {})
    assert half["losses"] == pytest.approx(full["losses"], rel=0.02)
    assert half["losses"] != full["losses"], "bfloat16 was used"


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_it_learns_nearly_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    (reference,) = resident(1, few_steps, BF16, {})
    (run, _) = resident(2, few_steps, BF16 | {"strategy": STRATEGIES[strategy]}, {axis: 2})
    assert run["losses"] == pytest.approx(reference["losses"], rel=2e-3)  # a bfloat16 keeps 8 bits: 4e-3


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm((8, 3)), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)], ids=lambda norm: type(norm).__name__
)  # fmt: skip
def test_a_norm_takes_what_is_whole_with_parameters_that_were_gathered_half(norm: nn.Module) -> None:
    gathered, x = deepcopy(norm), torch.randn(4, 8, 3)
    for parameter in gathered.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    with build().autocast(torch.device("cpu")):
        outputs = gathered(x)
    outputs.sum().backward()
    torch.testing.assert_close(outputs, norm(x))
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in gathered.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_norms_of_a_model_that_is_not_ours_train_alike_plain_and_sharded(precision: str, tmp_path: Path) -> None:
    words = (
        "model._target_=invariance.zoo.Plain", "trust=[invariance]", "data=synthetic", "objective=classification", "batch=8", "steps=3", "data.samples=64",
        "devices=2", f"precision={precision}", "optim=sgd", "precision.scale=1024" if precision == "fp16" else "seed=0", "logger=[]", "hook=[]",
    )  # fmt: skip
    copies, shards = (
        resident(2, train, plan(*words, f"strategy={name}", f"out={tmp_path / name}"))[0] for name in ("ddp", "fsdp")
    )
    assert shards.loss == pytest.approx(copies.loss, rel=2e-3)


MOE = {"_target_": "dtrain.model.moe.MoE", "vocab": 13, "layers": 2, "heads": 2, "width": 16, "experts": 4, "active": 2}
MESHES: dict[str, tuple[Any, dict[str, int], str]] = {
    "single": (PARTS["strategy"], {}, "whole"),
    "ddp": (STRATEGIES["ddp"], {"dp_replicate": 2}, "whole"),
    "fsdp": (STRATEGIES["fsdp"], {"dp_shard": 2}, "whole"),
    "tp": (STRATEGIES["ddp"], {"tp": 2}, "whole"),
    "sequence": (STRATEGIES["ddp"], {"tp": 2}, "split"),
}


def flows(mesh: Mesh, strategy: Any, model: Any, sequence: str) -> tuple[set[torch.dtype], list[float]]:
    """The types that enter and leave the embedding, the blocks and the norms; the logits."""
    seen, precision = set[torch.dtype](), build()
    built = construct(model, facts={"vocab": 13}, seed=0)
    tensors = {"sequence": sequence, "loss": "whole"}
    called = parallelize(built, mesh, make(strategy), precision=precision, seed=0, tensors=tensors)

    def note(module: nn.Module, args: Any, out: Tensor) -> None:
        seen.update(each.dtype for each in (*args, out) if isinstance(each, Tensor) and each.is_floating_point())

    for module in {*blocks(built), *(each for each in built.modules() if isinstance(each, Embedding | RMSNorm))}:
        module.register_forward_hook(note)
    with precision.autocast(mesh.device):
        logits = called(tokens(2, 10))
    logits.float().sum().backward()
    return seen, logits.detach().flatten().tolist()


@pytest.mark.parametrize(
    ("mesh", "model"), [*((mesh, PARTS["model"]) for mesh in MESHES), ("ddp", MOE), ("fsdp", MOE)],
    ids=lambda each: each if isinstance(each, str) else each["_target_"].rpartition(".")[2],
)  # fmt: skip
def test_what_flows_through_the_blocks_has_the_type_of_products_on_every_mesh(mesh: str, model: Any) -> None:
    strategy, degrees, sequence = MESHES[mesh]
    ((_, alone),) = on_resident_mesh(partial(flows, strategy=PARTS["strategy"], model=model, sequence="whole"))
    for types, logits in on_resident_mesh(partial(flows, strategy=strategy, model=model, sequence=sequence), **degrees):
        assert types == {torch.bfloat16}
        assert logits == alone
