"""distill: the loss and gradients of plain torch, and the same on every mesh."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
import torch.nn.functional as F
from adapted import MESHES, MORE
from small import agree, few_steps, on_resident_mesh, plan
from taught import STUDENT, distill, parts_of, steps_of, teach
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from dtrain.build import build
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.objective.divergence import divergence

one = cache(lambda teacher: few_steps(parts_of(teacher), {}, steps=8))
SPLIT = {"sequence": "whole", "loss": "split"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tmp_path_factory.mktemp("teacher") / "run")


@pytest.mark.often("fsdp 2", "tp 2")
@pytest.mark.parametrize("mesh", ["ddp 2", "fsdp 2", "tp 2"])
def test_it_trains_alike_on_every_mesh(mesh: str, teacher: Path) -> None:
    agree(steps_of(teacher, MESHES[mesh]), one(teacher), tolerance=2e-6)


def test_it_trains_alike_with_split_logits(teacher: Path) -> None:
    agree(steps_of(teacher, MESHES["tp 2"], tensors=SPLIT), one(teacher), tolerance=2e-6)


@pytest.mark.campaign("8 ranks")
def test_it_trains_alike_on_more_meshes(teacher: Path) -> None:
    agree(steps_of(teacher, MORE["fsdp 2 x tp 2"]), one(teacher), tolerance=2e-6)


@pytest.mark.campaign("documents")
def test_loss_and_gradients_are_those_of_plain_torch(tmp_path: Path) -> None:
    """A llama learns from a GPT-2 and from a larger llama, both of transformers."""
    done = commands.python(str(Path(__file__).with_name("beside_teachers.py")), str(tmp_path))
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == 6
    for case in cases:
        assert case["ours"] == pytest.approx(case["theirs"], rel=1e-6), case["case"]
        assert case["gradients"] < 1e-6 and case["tensors"] == 21, case["case"]


def logits(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(2, 5, 13, generator=torch.Generator().manual_seed(seed))).to(dtype)


def in_torch(mine: Tensor, theirs: Tensor, counts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(KL by torch of each token, gradient of its sum with regard to `mine`), in fp64."""
    mine = mine.double().detach().requires_grad_()
    q, p = (F.log_softmax(each.double() / temperature, -1) for each in (mine, theirs))
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1) * counts
    kl.sum().backward()
    assert mine.grad is not None
    return kl.detach().flatten(), mine.grad


COUNTS = torch.arange(10).view(2, 5) % 4 > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_divergence_is_that_of_torch(temperature: float, dtype: torch.dtype) -> None:
    mine, theirs = logits(1, dtype).requires_grad_(), logits(2, dtype)
    apart = divergence(mine, theirs, COUNTS, temperature)
    apart.sum().backward()
    expected, gradient = in_torch(mine, theirs, COUNTS, temperature)
    torch.testing.assert_close(apart.detach().double(), expected, rtol=1e-6, atol=1e-7)
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad.double(), gradient, rtol=1e-6 if dtype.itemsize == 4 else 1e-2, atol=1e-7)


def test_tokens_that_both_models_mask_add_nothing() -> None:
    mine, theirs = logits(1), logits(2)
    apart = divergence(mine[..., :12], theirs[..., :12], COUNTS, 1.0)
    mine[..., 12] = theirs[..., 12] = -torch.inf
    torch.testing.assert_close(divergence(mine, theirs, COUNTS, 1.0), apart)


def in_layouts(mesh: Mesh) -> dict[str, tuple[list[float], list[float]]]:
    """KL and gradient for each way in which tensor parallelism may leave both logits."""
    found = {}
    split = lambda whole: distribute_tensor(whole, mesh.axis("tp"), [Shard(2)])  # noqa: E731
    for name, ours, others in (("both", split, split), ("student", split, logits_as), ("teacher", logits_as, split)):
        mine = ours(logits(1)).detach().requires_grad_()
        apart = divergence(mine, others(logits(2)), COUNTS, 2.0)
        apart.sum().backward()
        assert mine.grad is not None
        whole = mine.grad.full_tensor() if ours is split else mine.grad  # type: ignore[attr-defined]
        found[name] = apart.tolist(), whole.flatten().tolist()
    return found


def logits_as(whole: Tensor) -> Tensor:
    return whole


def test_a_vocabulary_may_be_split_in_one_model_or_both() -> None:
    expected, gradient = in_torch(logits(1), logits(2), COUNTS, 2.0)
    for found in on_resident_mesh(in_layouts, tp=2):
        for apart, slope in found.values():
            torch.testing.assert_close(torch.tensor(apart).double(), expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(torch.tensor(slope).double(), gradient.flatten(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0])
def test_the_loss_weighs_both_parts(hard: float) -> None:
    mine, batch = logits(1).requires_grad_(), {"targets": torch.where(COUNTS, 4, -100), "reference": logits(2)}
    loss = build(distill("large", hard=hard)).loss(mine, batch)
    loss.sum.backward()
    kl, nats = loss.metrics["kl"].item(), loss.metrics["cross_entropy"].item()
    assert kl == pytest.approx(4 * in_torch(mine, logits(2), COUNTS, 2.0)[0].sum().item(), rel=1e-6)
    assert nats == pytest.approx(F.cross_entropy(mine.flatten(0, 1), batch["targets"].flatten(), reduction="sum").item())  # fmt: skip
    assert loss.sum.item() == pytest.approx((1 - hard) * kl + hard * nats, rel=1e-6)
    assert mine.grad is not None and bool(mine.grad[~COUNTS].eq(0).all()) and bool(mine.grad[COUNTS].ne(0).any())


def test_logits_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(WordsError, match=r"objective\.teacher: its logits are \[2, 5, 12\], those of the model"):
        divergence(logits(1), logits(2)[..., :12], COUNTS, 1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "objective=distill needs objective.teacher. Type objective.teacher="),
        (("objective.teacher=large", "objective.temperature=0"), "objective.temperature is a number > 0"),
        (("objective.teacher=large", "objective.hard=1.5"), "objective.hard is a number >= 0 and <= 1"),
        (("objective.teacher=large", "mesh.pp=2", "devices=2", "batch=4"), "a teacher is split by the data axes and mesh.tp alone, and mesh.pp=2"),
        (("objective.teacher=large", "mesh.cp=2", "devices=2"), "and mesh.cp=2. Leave mesh.cp out"),
        (("objective.teacher=runs/a/checkpoints/step-00000003", "out=runs/a"), "is this run: out=runs/a"),
        (("objective.teacher=large", "model=cnn"), "objective=distill needs a model of tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_launch(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*STUDENT, *words)
    assert message in str(caught.value)


def test_its_figures_can_choose_a_checkpoint() -> None:
    decided: Any = plan(*STUDENT, "objective.teacher=large", "checkpoint.best=eval_kl")
    assert decided.checkpoint["best_is"] == "lowest"
