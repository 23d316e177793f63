"""Detects spikes of the loss or gradient norm (not finite, or far above recent values) and decides, with `on_spike`,
alike on every rank.

Both numbers are global, so all ranks decide alike. On the CPU they are read at once. On a GPU nobody waits: the device
skips the update (`found_inf` of torch's fused optimizers), and the host learns of it `LAG` steps later. With optimizers
that cannot skip (muon, adafactor), with fp16 and with balanced experts, every step waits for the device.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from dtrain.checkpoint.state import TrainState
from dtrain.data.stream import Stream
from dtrain.loop.step import StepLoss
from dtrain.mesh import Mesh
from dtrain.model import balanced
from dtrain.optim import inner
from dtrain.precision import LossScale

LAG = 8
"""Steps after which the host reads the device's decision; it never runs further ahead."""
MOST = 10
"""Spikes in a row that are skipped, and rewinds to one checkpoint, before the run stops: then the data is not the
cause.
"""
FLOOR, REACH = 0.1, 2.0
"""Minimal distance of a spike from the mean, as a fraction of the mean, and as a multiple of the window's largest
value: heavy-tailed batches are no spikes.
"""
LEAVE_OUT = "on_spike=skip to leave such steps out"
LARGEST = torch.finfo(torch.float32).max


class Gated(Protocol):
    """A torch optimizer whose kernels skip the update when `found_inf` is 1."""

    found_inf: Tensor | None


@dataclass(frozen=True)
class Spike:
    """The spike would have been `step`, on the samples from `first` on; `why`: the beginning of a sentence."""

    step: int
    first: int
    loss: float
    norm: float
    why: str


@dataclass(frozen=True)
class PendingStep:
    """A step that the host has not read yet: `values` are norm, sum of losses, 1 if it was skipped; valid after
    `copied`.
    """

    step: int
    first: int
    loss: StepLoss
    limits: tuple[float, float]
    values: Tensor
    copied: torch.Event | None


@dataclass(frozen=True)
class Decision:
    """`spike`: of this step, or of an earlier one that the device skipped. `action`: apply the update, skip it, rewind
    to the newest checkpoint, or stop before it.
    """

    action: Literal["apply", "skip", "rewind", "stop"]
    spike: Spike | None = None


def limit(past: Sequence[float], sigma: float) -> float:
    """Upper bound of a normal value."""
    mean = sum(past) / len(past)
    deviation = math.sqrt(max(0.0, sum(map(mul, past, past)) / len(past) - mean * mean))
    return mean + max(sigma * deviation, REACH * (max(past) - mean), FLOOR * abs(mean))


class SpikeDetector:
    """`answer`: stop, skip or rewind. A spike is `sigma` standard deviations above the mean of the last `window` steps
    (None: only nan and inf). `gates`: the optimizers that can skip on the device.
    """

    gate: Tensor | None
    """On the device: 1 to apply the newest update, 0 to skip it; None if the host has decided."""

    def __init__(
        self, answer: str, *, sigma: float | None, window: int, mesh: Mesh, gates: Sequence[Gated],
        scale: LossScale | None = None,
    ) -> None:  # fmt: skip
        self._answer, self._sigma, self._window, self._mesh = answer, sigma, window, mesh
        self._gates, self._scale, self._fresh, self.gate = gates, scale, True, None
        kept = window + (LAG if gates else 0)
        self._norms, self._losses = deque[float](maxlen=kept), deque[float](maxlen=kept)
        self._row, self._rewinds = 0, Counter[int]()
        self._pending, self._spikes = deque[PendingStep](), deque[Spike]()
        self._halted = torch.zeros((), dtype=torch.bool, device=mesh.device)

    def part(self, loss: StepLoss) -> Tensor | None:
        """This rank's part of the loss, for `clip` to sum over all ranks; None if only the norm counts."""
        if self._sigma is None:
            return None
        total = loss.sums["loss"]
        return total if self._mesh.world == 1 else total.float() / self._mesh.shape.tp

    def decide(
        self, step: int, first: int, loss: StepLoss, norm: Tensor, total: Tensor | None, *, now: bool
    ) -> Decision:
        """Decide about this update, after `step` steps, on the samples from `first` on. `now`: the host reads every
        step at once. A step in which no target counts is skipped: it has no loss to judge, and would only decay.

        All ranks call it, with the same `norm` and `total`.
        """
        known = math.nan
        if not loss.count:
            self._catch_up(0 if now else LAG)
            spike = self._spikes.popleft() if self._spikes else None
        elif not self._gates or self._fresh:
            self._fresh, self.gate = False, None
            self._arm(None)
            known = norm.item()
            spike = self._judge_now(step, first, loss, known, 0.0 if total is None else total.item())
        else:
            self._judge_later(step, first, loss, norm, total)
            self._catch_up(0 if now else LAG)
            spike = self._spikes.popleft() if self._spikes else None
        if spike and self._answer == "rewind" and self._rewinds[spike.step] < MOST:
            self._rewinds[spike.step] += 1
            return Decision("rewind", spike)
        if spike and (self._answer != "skip" or self._row >= MOST):
            return Decision("stop", spike)
        if not loss.count or (spike and self.gate is None):
            return Decision("skip", spike)
        taken = self._scale is None or self._scale.accept(known)
        return Decision("apply" if taken else "skip", spike)

    def settle(self) -> list[Spike]:
        """At the end of the loop: spikes that the host had not read. Unless they are skipped, the state of training is
        the one before the last of them.
        """
        self._catch_up(0)
        spikes = list(self._spikes)
        self._spikes.clear()
        return spikes

    def forget(self, *, restored: bool = False) -> None:
        """Training went back: forget steps that the host has not read. `restored`: to a checkpoint."""
        self._pending.clear()
        self._spikes.clear()
        self._halted.zero_()
        self._fresh = self._fresh or restored

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "losses": list(self._losses), "row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for values, saved in ((self._norms, state["norms"]), (self._losses, state["losses"])):
            values.clear()
            values.extend(saved)
        self._row = state["row"]

    def _limits(self) -> tuple[float, float]:
        """Upper bounds of a normal norm and loss; LARGEST, which nothing exceeds, while the window is not full."""
        # with gates always the same steps count, whether the host has heard of more or not
        late = LAG - len(self._pending) if self._gates else 0
        count = len(self._norms) - late
        if self._sigma is None or count < self._window:
            return LARGEST, LARGEST
        norms, losses = (list(values)[count - self._window : count] for values in (self._norms, self._losses))
        return limit(norms, self._sigma), limit(losses, self._sigma)

    def _judge_now(self, step: int, first: int, loss: StepLoss, norm: float, total: float) -> Spike | None:
        count = loss.count or 1
        # below all of the window is below any limit: no need to know it
        if self._norms and norm <= max(self._norms) and -LARGEST <= total / count <= max(self._losses):
            self._row = 0
            self._norms.append(norm)
            self._losses.append(total / count)
            return None
        limits = self._limits()
        bad = not (norm <= limits[0] and -LARGEST <= total <= limits[1] * count)
        return self._hear(
            PendingStep(step=step, first=first, loss=loss, limits=limits, values=torch.empty(0), copied=None),
            norm,
            total,
            bad=bad,
        )

    def _judge_later(self, step: int, first: int, loss: StepLoss, norm: Tensor, total: Tensor | None) -> None:
        """Let the device decide; the host reads the copy when it has arrived."""
        limits = self._limits()
        bad = ~(norm <= limits[0])
        if total is not None:
            bad |= ~((total >= -LARGEST) & (total <= min(LARGEST, limits[1] * (loss.count or 1))))
        if self._answer != "skip":  # the state stays what it was before the spike until the host has heard of it
            bad = self._halted = bad | self._halted
        self.gate = (~bad).float()
        self._arm(bad.float())
        device, copied = self._mesh.device, None
        copy = torch.empty(3, pin_memory=device.type != "cpu")
        copy.copy_(torch.stack([norm, norm if total is None else total, bad.float()]), non_blocking=True)
        if device.type != "cpu":
            copied = torch.Event(device)
            copied.record()
        self._pending.append(PendingStep(step=step, first=first, loss=loss, limits=limits, values=copy, copied=copied))

    def _hear(self, step: PendingStep, norm: float, total: float, *, bad: bool) -> Spike | None:
        """Add a step's numbers to the window, or return that they are a spike."""
        count = step.loss.count or 1
        if not bad:
            self._row = 0
            if self._sigma is not None:
                self._norms.append(norm)
                self._losses.append(total / count)
            return None
        if self._sigma is None:  # rare, and every rank is here: all have the same norm
            total = self._mesh.sum_stages(self._mesh.sum(step.loss.sums["loss"].clone().float())).item()
        mean, scale = total / count, self._scale
        if scale and scale.value > 1 and mean <= step.limits[1] and not math.isfinite(norm):
            return None  # fp16 ran over, and a smaller scale will do
        self._row += 1
        return Spike(step.step + 1, step.first, mean, norm, _why(norm, mean, step.limits))

    def _catch_up(self, most: int) -> None:
        """Read steps until at most `most` are left, or one of them ends the walk."""
        while len(self._pending) > most and not (self._spikes and self._answer != "skip"):
            step = self._pending.popleft()
            if step.copied is not None:
                step.copied.synchronize()
            norm, total, bad = step.values.tolist()
            spike = self._hear(step, norm, total, bad=bool(bad))
            if spike:
                self._spikes.append(spike)

    def _arm(self, skip: Tensor | None) -> None:
        for gated in self._gates:
            gated.found_inf = skip


def gates(state: TrainState, mesh: Mesh) -> list[Gated]:
    """The torch optimizers that can skip on the device; none if one of any rank cannot, or if there are others."""
    if mesh.device.type == "cpu" or any(parameter.device.type == "cpu" for parameter in state.model.parameters()):
        return []  # reading a norm there costs nothing
    parts = inner(state.optimizer) if state.optimizer else []
    can = all(getattr(part, "_step_supports_amp_scaling", False) for part in parts)
    can = can and state.scale is None and not balanced(state.model)
    return cast("list[Gated]", parts) if mesh.max(torch.tensor(0.0 if can else 1.0)).item() == 0 else []


def _why(norm: float, loss: float, limits: tuple[float, float]) -> str:
    for name, value, most in (("loss", loss, limits[1]), ("gradient norm", norm, limits[0])):
        if not math.isfinite(value):
            return f"the {name} is {value}"
        if value > most:
            return f"the {name} {value:.4g} is above {most:.4g}"
    return "the numbers are no longer finite"


def sentence(spike: Spike, stream: Stream, answer: str) -> str:
    """The reason why the run stops, and what to type. All ranks call it; no step follows."""
    samples, named = stream.samples(spike.first), ""
    if not (math.isfinite(spike.loss) and math.isfinite(spike.norm)) and (odd := stream.odd(spike.first)):
        named = f" Sample {_listed(odd)} has NaN or an infinite number: drop or fill it."
    last = spike.first + len(samples) - 1
    numbers = f"loss {spike.loss:.4g}, gradient norm {spike.norm:.4g}"
    where = f"positions {spike.first} to {last} of the order, samples {_listed(samples)}"
    advice = f"a smaller optim.lr: {MOST} times in a row on_spike={answer} did not help"
    if answer == "stop":
        advice = f"{LEAVE_OUT}, or on_spike=rewind to go back to the newest checkpoint and pass over these samples"
    return f"step {spike.step}: {spike.why} ({numbers}; {where}).{named} The state before it is saved. Type {advice}."


def _listed(samples: Sequence[int]) -> str:
    return f"{', '.join(map(str, samples[:8]))}{', ...' if len(samples) > 8 else ''}"
