"""float8 products of the linear layers in the blocks; what it needs is told before a run begins."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from small import plan

from dtrain.cluster import Cluster
from dtrain.errors import PreflightError, WordsError
from dtrain.precision.fp8 import build


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """A stand-in that writes down what it was asked to convert."""
    converted: list[tuple[Any, str]] = []

    class Float8LinearConfig:
        @staticmethod
        def from_recipe_name(name: str) -> str:
            return name

    module = ModuleType("torchao.float8")
    vars(module).update(Float8LinearConfig=Float8LinearConfig, convert_to_float8_training=lambda block, config: converted.append((block, config)))
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    return converted


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(PreflightError, match=r"needs torchao: .*Type: pip install torchao, or precision=bf16"):
        build(recipe="tensorwise")


@pytest.mark.parametrize("found", [None, (8, 0)])
def test_a_gpu_that_cannot_is_refused(found: tuple[int, int] | None, torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)
    with pytest.raises(PreflightError, match=r"compute capability 8\.9"):
        build(recipe="tensorwise")


def test_every_block_is_converted_by_the_recipe(torchao: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    precision, blocks = build(recipe="rowwise"), [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    assert precision.convert is not None
    precision.convert(blocks)
    assert torchao == [(block, "rowwise") for block in blocks]
    assert (precision.param, precision.compute) == (torch.float32, torch.bfloat16)


def test_a_run_on_the_cpu_is_refused_in_words() -> None:
    with pytest.raises(WordsError, match=r"precision=fp8 needs cuda, this run is on cpu\. Type precision=bf16\."):
        plan("precision=fp8")
    assert plan("precision=fp8", on=Cluster(gpus=1, cpus=2)).device == "cuda"


@pytest.mark.gpu
def test_products_are_near_those_of_bfloat16() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    block, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda(), torch.randn(32, 64, device="cuda")
    expected = block(x)
    precision = build(recipe="tensorwise")
    assert precision.convert is not None
    precision.convert([block])
    with precision.autocast(x.device):
        found = block(x)
    found.float().sum().backward()
    assert (found.float() - expected).norm() / expected.norm() < 0.1
    assert not torch.equal(found.float(), expected)
