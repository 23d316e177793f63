"""What a GPU would be the first to see: tensors of two devices that meet, tensors made on no device, and lines where the host waits for it."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankFailed, ranks
from rehearsal import FEW, STEPS, Fault, Rehearsed, rehearse
from small import plan
from torch.utils import backend_registration

from dtrain.train import train

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch 2.13 is the first whose accelerators may be written in Python",
)
GPT = ("model=gpt", "model.layers=2", "model.width=32", "data.sequence=16")
MOE = ("model=moe", *GPT[1:])
TWO = "devices=2"

FREE = [
    ("model=mlp",), ("model=cnn", "model.width=8"), GPT, (*GPT, "optim=sgd"), (*GPT, "precision=bf16"), (*GPT, "precision=bf16_true"),
    (*GPT, "remat=full"), (*GPT, "remat=selective"), (*GPT, "remat=budget"), (*GPT, "ema=0.99"), (*GPT, "microbatch=2"), (*GPT, "model.tied=true"),
    (*GPT, "on_spike=skip", "spike.sigma=6"), (*GPT, "on_spike=rewind", "spike.sigma=6", "ema=0.99"),
    (*GPT, TWO, "strategy=ddp"), (*GPT, TWO, "strategy=zero1"), (*GPT, TWO, "strategy=zero2", "precision=bf16"), (*GPT, TWO, "strategy=zero3", "remat=full"),
    (*GPT, TWO, "mesh.tp=2"), (*GPT, TWO, "mesh.pp=2", "microbatch=4"), (*GPT, TWO, "mesh.cp=2"),
]  # fmt: skip
"""The plan calls these free of waiting."""

JUDGE = "loop/spike.py decide"
WAITING = {
    (*GPT, "optim=muon"): {JUDGE: 1}, (*GPT, "optim=adafactor"): {JUDGE: 1}, (*GPT, "precision=fp16"): {JUDGE: 1},
    (*GPT, "optim=muon", "spike.sigma=6", "on_spike=skip"): {JUDGE: 2},
    MOE: {JUDGE: 1, "model/moe.py by_expert": 2}, (*MOE, "precision=bf16"): {JUDGE: 1},
    (*GPT, TWO, "strategy=zero3", "strategy.offload=cpu"): {"_fsdp_param_group.py finalize_backward": 21},
    (*MOE, TWO, "mesh.ep=2"): {JUDGE: 1, "model/moe.py by_expert": 2, "parallel/expert.py __call__": 2},
}  # fmt: skip
"""Words -> where the host waits in each step, and how often; the table of docs/mesh.md ("When a step waits for the GPU") says why."""

LAGGING = "loop/spike.py _catch_up"
"""It waits for what the device found eight steps ago."""
OF_THE_HOST = {
    "checkpoint/snapshot.py __init__", "checkpoint/snapshot.py _lay_out", "checkpoint/snapshot.py _memory", "loop/spike.py _judge_now", "loop/spike.py _judge_later", "loop/spike.py decide",
    "mesh/__init__.py gather", "optim/adafactor.py _begin", "parallel/pipeline.py step", "model/seeds.py _fill", "strategy/units.py _pass",
}  # fmt: skip
"""Tensors are made on the CPU there; tests/house/test_devices.py says why."""


def name(words: Any) -> str:
    return " ".join(word for word in words if word not in (*GPT[1:], TWO)) if isinstance(words, tuple) else str(words)


def unexpected(found: list[Rehearsed], waits: dict[str, float]) -> list[str]:
    """Sentences; none when a GPU has nothing to say."""
    said = []
    for rank, each in enumerate(found):
        if each.step != STEPS:
            said.append(f"rank {rank} ends at step {each.step}")
        each_step = {where: count for where, count in each.each_step.items() if where != LAGGING}
        if each_step != waits:
            said.append(f"rank {rank} waits at {each_step}, expected {waits}")
        if each.homeless - OF_THE_HOST:
            said.append(f"rank {rank} makes tensors on no device in {sorted(each.homeless)}")
    return said


@pytest.mark.often(
    "model=mlp-*", "model=gpt remat=selective-*", "model=gpt on_spike=rewind*", "*zero2*", "model=gpt mesh.pp=2*",
    "model=gpt optim=muon spike*", "model=moe mesh.ep=2*",
)  # fmt: skip
@pytest.mark.parametrize(("words", "waits"), [*((words, {}) for words in FREE), *WAITING.items()], ids=name)
def test_a_run_on_a_gpu_waits_where_it_is_said_to_wait_and_nowhere_else(
    words: tuple[str, ...], waits: dict[str, float]
) -> None:
    found = rehearse(*words)
    assert unexpected(found, waits) == []
    (there,) = {each.loss for each in found} - {None}
    assert there == pytest.approx(
        on_the_cpu(words), rel=2e-5 if not any("precision" in word for word in words) else 2e-2
    )


def test_the_page_lists_every_word_for_which_a_step_waits() -> None:
    page = (
        (Path(__file__).parents[1] / "docs" / "mesh.md")
        .read_text()
        .split("**When a step waits for the GPU.**")[1]
        .split("\n\n**")[0]
    )
    said = {
        word
        for words in WAITING
        for word in words
        if word not in (*GPT, TWO, "precision=bf16", "strategy=zero3", "on_spike=skip")
    }
    assert {word for word in said if f"`{word.replace('=2', '').replace('=6', '')}" not in page} == set()


def on_the_cpu(words: tuple[str, ...]) -> float:
    """The loss of the same words, on one process of this machine in fp32, whatever the mesh."""
    return _alone(
        tuple(
            word
            for word in words
            if not word.startswith((TWO, "mesh.", "strategy", "precision", "remat", "microbatch", "ema"))
        )
    )


@cache
def _alone(words: tuple[str, ...]) -> float:
    made = plan(*FEW, "out=memory://rehearsal", *words)
    (loss,) = ranks(1, lambda: train(made).loss)
    assert loss is not None
    return float(loss)


FAULTS: list[tuple[str, Fault, tuple[str, ...]]] = [
    ("item in the loop", Fault("train", "last, due = state.step", 'loss.sums["loss"].item(); last, due = state.step'), GPT),
    ("float of the norm at each row", Fault("loop.metrics", "if now or step % self._every == 0:", "if norm > 0 and now:"), GPT),
    ("a weight of the loss on the cpu", Fault("loop.step", "return loss.sum * weight", "return loss.sum * torch.tensor([weight])"), GPT),
    ("gates read by the host", Fault("optim.ema", "torch._foreach_mul_(steps, gate * (1 - self._decay))", "torch._foreach_mul_(steps, gate.item() * (1 - self._decay))"), (*GPT, "ema=0.9")),
    ("the guard copies into pageable memory", Fault("loop.spike", 'torch.empty(3, pin_memory=device.type != "cpu")', "torch.empty(3)"), GPT),
    ("the guard reads what has not arrived", Fault("loop.spike", "if step.copied is not None:", "if False:"), GPT),
    ("the guard's flag is on the cpu", Fault("loop.spike", "torch.zeros((), dtype=torch.bool, device=mesh.device)", "torch.zeros(1, dtype=torch.bool)"), GPT),
    ("batches are copied and waited for", Fault("data.stream", "tensor.pin_memory().to(device, non_blocking=True)", "tensor.to(device)"), GPT),
    ("angles of the rotary on the cpu", Fault("model.gpt", "self._cached = self._angles(torch.arange(tokens, device=device))", "self._cached = self._angles(torch.arange(tokens))"), GPT),
    ("a boolean index in the loss", Fault("objective.next_token", "loss = Loss(cross_entropy(logits, targets))", "loss = Loss(cross_entropy(logits[targets != IGNORE], targets[targets != IGNORE]))"), GPT),
    ("the norm goes to the cpu", Fault("optim.clip", "    return norm\n\n\ndef _norms", "    return norm.cpu()\n\n\ndef _norms"), GPT),
    ("a stack of norms on the cpu", Fault("optim.clip", "sum(squares, torch.zeros((), device=_device(parameters)))", "sum(squares, torch.zeros(1))[0]"), (*GPT, TWO, "strategy=zero2")),
    ("a pipeline's buffer without a device", Fault("loop.step", "torch.zeros(shape, device=mesh.device)", "torch.zeros(shape)"), (*GPT, TWO, "mesh.pp=2", "microbatch=4")),
    ("the sums of a ring on the cpu", Fault("parallel.ring", "dtype=lse.dtype, device=x.device)", "dtype=lse.dtype)"), (*GPT, TWO, "mesh.cp=2")),
    ("rows of experts on the cpu", Fault("parallel.expert", "torch.arange(receive.shape[1], device=x_RC.device)", "torch.arange(receive.shape[1])"), (*MOE, TWO, "mesh.ep=2")),
    ("a balance on the host", Fault("model", "module.balance(part)", "module.balance(torch.tensor(part.tolist()))"), MOE),
    ("muon's iteration looks at its norm", Fault("optim.muon", "x = matrices.mT if tall else matrices\n", "x = matrices.mT if tall else matrices\n    assert matrices.isfinite().all()\n"), (*GPT, "optim=muon")),
    ("positions of a part on the cpu", Fault("parallel.context", "self.cut(torch.arange(T, device=self.device)[None])", "self.cut(torch.arange(T)[None])"), (*GPT, TWO, "mesh.cp=2")),
    ("buffers rest on the cpu", Fault("parallel.order", "    place_buffers(model, mesh.device)\n", ""), (*MOE, TWO, "strategy=zero3", "strategy.offload=cpu")),
]  # fmt: skip
"""Name, what is changed, and the words of a run that it breaks or slows."""


@pytest.mark.often(
    "item in the loop", "the guard copies into pageable memory", "a boolean index in the loss",
    "a pipeline's buffer without a device", "positions of a part on the cpu",
)  # fmt: skip
@pytest.mark.parametrize(("fault", "words"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_planted_fault_is_found(fault: Fault, words: tuple[str, ...]) -> None:
    try:
        found = rehearse(*words, fault=fault)
    except RankFailed as failed:
        assert "same device" in str(failed) or "nan" in str(failed), failed
    else:
        assert unexpected(found, WAITING.get(words, {}))


def test_the_thread_that_pins_samples_does_so_on_the_device_of_its_rank() -> None:
    (found,) = rehearse(*GPT)
    assert found.chosen_in == {"dtrain-data"}


def test_what_a_checkpoint_holds_has_arrived_when_it_is_written(tmp_path: Path) -> None:
    """The copy to the host waits for nobody: not the loop waits for it, but who writes."""
    written = Fault("checkpoint.snapshot", "self._copied.synchronize()", "pass")
    (found,) = rehearse(*GPT, out=tmp_path / "right")
    assert not any(note.kind == "waits" and "checkpoint" in note.where for note in found.notes)
    rehearse(*GPT, out=tmp_path / "early", fault=written)
    assert [any_nan(tmp_path / each) for each in ("right", "early")] == [False, True]


def any_nan(out: Path) -> bool:
    from safetensors.torch import load_file

    (*_, newest) = sorted(out.rglob("*.safetensors"))
    return any(bool(tensor.isnan().any()) for tensor in load_file(newest).values() if torch.is_floating_point(tensor))
