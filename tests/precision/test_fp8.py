"""float8 products of the linear layers in the blocks; what it needs is told before a run begins."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from pool import ranks, resident
from small import PARTS, STRATEGIES, agree, few_steps, joined, plan
from torch import Tensor, nn

from dtrain.cluster import Cluster
from dtrain.errors import PreflightError, WordsError
from dtrain.planned import PipelineShape
from dtrain.precision import Precision
from dtrain.precision.fp8 import build


class Float8Linear(nn.Linear):
    """As torchao's: a new module with the weight of the old one, and none of its hooks."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Float8Linear.calls += 1
        return super().forward(x)


def convert(module: nn.Module, *, config: str, module_filter_fn: Any, path: str = "") -> None:
    """As torchao's: where a linear layer is the module itself, nothing is changed in place."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and module_filter_fn(child, f"{path}{name}"):
            with torch.device("meta"):
                made = Float8Linear(child.in_features, child.out_features, bias=False)
            made.weight, made.bias, made.config = child.weight, child.bias, config
            setattr(module, name, made)
        else:
            convert(child, config=config, module_filter_fn=module_filter_fn, path=f"{path}{name}.")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in, and a GPU that can."""

    class Float8LinearConfig:
        @staticmethod
        def from_recipe_name(name: str) -> str:
            return name

    module = ModuleType("torchao.float8")
    vars(module).update(Float8LinearConfig=Float8LinearConfig, convert_to_float8_training=convert)
    package = ModuleType("torchao")
    package.__spec__ = ModuleSpec("torchao", loader=None)  # transformers asks for it
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(PreflightError, match=r"needs torchao: .*Type: pip install torchao, or precision=bf16"):
        build(recipe="tensorwise")


@pytest.mark.parametrize("capability", [None, (8, 0)])
def test_a_gpu_that_cannot_is_refused(
    capability: tuple[int, int] | None, torchao: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(PreflightError, match=r"compute capability 8\.9"):
        build(recipe="tensorwise")


def test_every_layer_in_a_block_is_converted_by_the_recipe_where_products_of_float8_can_be(torchao: None) -> None:
    precision, model = (
        build(recipe="rowwise"),
        nn.Sequential(nn.Linear(16, 32), nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 5))),
    )
    outside = nn.ModuleDict({"blocks": model, "head": nn.Linear(16, 16)})
    names = list(outside.state_dict())
    assert precision.convert is not None
    precision.convert(outside)
    assert [type(module) for module in outside.modules() if isinstance(module, nn.Linear)] == [
        Float8Linear,
        Float8Linear,
        nn.Linear,
        nn.Linear,
    ]
    assert model[0].config == "rowwise"
    assert list(outside.state_dict()) == names
    assert (precision.param, precision.compute) == (torch.float32, torch.bfloat16)


@pytest.mark.often("degrees0")
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}])
def test_layers_that_are_replaced_are_split_and_cut_as_the_others_are(torchao: None, degrees: dict[str, int]) -> None:
    """What tensor parallelism hangs on a layer is lost where the layer is replaced afterwards."""
    model = PARTS["model"] | {"tied": False}
    parts = PARTS | {"model": model, "strategy": STRATEGIES["ddp"], "precision": {"_target_": f"{__name__}.in_fp32"}}

    def run() -> tuple[Any, int]:
        steps = few_steps(parts, degrees, pipeline=PipelineShape() if "pp" in degrees else None)
        return steps, Float8Linear.calls

    (reference,) = resident(1, few_steps, PARTS | {"model": model}, {})
    runs = ranks(2, run)
    for steps in [joined([steps for steps, _ in runs])] if "pp" in degrees else [steps for steps, _ in runs]:
        agree(steps, reference)
    assert all(calls for _, calls in runs)


def in_fp32() -> Precision:
    """The layers of fp8, in a type in which runs are compared."""
    return replace(build(recipe="tensorwise"), compute=torch.float32)


def test_a_run_on_the_cpu_is_refused_in_words() -> None:
    with pytest.raises(WordsError, match=r"precision=fp8 needs cuda, this run is on cpu\. Type precision=bf16\."):
        plan("precision=fp8")
    assert plan("precision=fp8", on=Cluster(gpus=1, cpus=2)).device == "cuda"


@pytest.mark.gpu
def test_products_are_near_those_of_bfloat16() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda(), torch.randn(32, 64, device="cuda")
    expected = block(x)
    precision = build(recipe="tensorwise")
    assert precision.convert is not None
    precision.convert(block)
    with precision.autocast(x.device):
        output = block(x)
    output.float().sum().backward()
    assert (output.float() - expected).norm() / expected.norm() < 0.1
    assert not torch.equal(output.float(), expected)
