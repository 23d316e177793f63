"""What happens when the gradient norm or the loss is not a number, or jumps: the word `on_spike`, the same on every
rank.

Both numbers are of the whole world, so all ranks judge alike. On the CPU they are read at once. On a GPU nobody waits:
the device itself leaves the update out (the `found_inf` of torch's fused optimizers), and the host hears of it `LAG`
steps later. Where an optimizer has no such gate (muon, adafactor), with fp16 and with experts that are balanced, every
step waits for the device.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtrain.checkpoint import Checkpoint
from dtrain.checkpoint.state import TrainState
from dtrain.data.stream import Stream
from dtrain.errors import LeaseError, StoreError
from dtrain.loop.metrics import Log
from dtrain.loop.step import StepLoss
from dtrain.mesh import Mesh
from dtrain.model import balanced
from dtrain.optim import forget, inner

LAG = 8
"""Steps after which the host reads what the device found; it never runs further ahead of it."""
MOST = 10
"""Spikes one after another that are skipped, and rewinds to one checkpoint, before the run stops: then it is not the
data.
"""
FLOOR, REACH = 0.1, 2.0
"""A spike is further above the mean than this part of it, and than this many times the largest of the window: batches
with long tails are no spikes.
"""
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Spike:
    """`step` would have been this one, on the samples of the order that begin at `first`; `why` is a sentence's
    beginning.
    """

    step: int
    first: int
    loss: float
    norm: float
    why: str


@dataclass(frozen=True)
class PendingStep:
    """A step of which the host does not know yet: `values` are norm, sum of losses, 1 when it was left out; there once
    `copied`.
    """

    step: int
    first: int
    loss: StepLoss
    limits: tuple[float, float]
    values: Tensor
    copied: torch.Event | None


def limit(past: Sequence[float], sigma: float) -> float:
    """The largest value that is none of a spike."""
    mean = sum(past) / len(past)
    deviation = math.sqrt(max(0.0, sum(map(mul, past, past)) / len(past) - mean * mean))
    return mean + max(sigma * deviation, REACH * (max(past) - mean), FLOOR * abs(mean))


class SpikeDetector:
    """`answer` is stop, skip or rewind; a spike is `sigma` standard deviations above the mean of the last `window`
    steps (None: only nan and inf).
    """

    def __init__(
        self, answer: str, *, sigma: float | None, window: int, mesh: Mesh, state: TrainState, wrapped: nn.Module
    ) -> None:
        self._answer, self._sigma, self._window, self._mesh, self._state, self._wrapped = (
            answer,
            sigma,
            window,
            mesh,
            state,
            wrapped,
        )
        self._gates, self._fresh = gates(state, mesh), True
        held = window + (LAG if self._gates else 0)
        self._norms, self._losses = deque[float](maxlen=held), deque[float](maxlen=held)
        self._row, self._rewinds, self._norm = 0, Counter[int](), math.nan
        self._held, self._found = deque[PendingStep](), deque[Spike]()
        self._halted = torch.zeros((), dtype=torch.bool, device=mesh.device)
        self.gate: Tensor | None = None
        """On the device: 1 when the newest update is taken, 0 when not; None when the host has decided."""
        self.reason = ""
        """The sentence with which the run must stop."""

    def begin(self, checkpoint: Checkpoint, *, restored: bool) -> None:
        """Before the first step: there must be something to go back to."""
        if self._answer == "rewind" and not restored:
            checkpoint.save(self._state)

    def listen(self, loss: StepLoss) -> Tensor | None:
        """This rank's part of the loss, for `clip` to sum over the world; None when only the norm counts."""
        if self._sigma is None:
            return None
        total = loss.sums["loss"]
        return total if self._mesh.world == 1 else total.float() / self._mesh.shape.tp

    def judge(self, step: int, loss: StepLoss, norm: Tensor, total: Tensor | None, *, now: bool) -> Spike | None:
        """A spike that was found, after `step` steps: of this step, or of an earlier one that the device left out.
        `now`: the host must know all.

        All ranks call it, with the same `norm` and `total`.
        """
        if not self._gates or self._fresh:
            self._fresh, self.gate = False, None
            self._arm(None)
            self._norm = norm.item()
            return self._judge_now(step, loss, self._norm, 0.0 if total is None else total.item())
        first, limits = self._stream.first, self._limits()
        bad = ~(norm <= limits[0])
        if total is not None:
            bad |= ~((total >= -LARGEST) & (total <= min(LARGEST, limits[1] * max(1, loss.count))))
        if self._answer != "skip":  # the state stays what it was before the spike until the host has heard of it
            bad = self._halted = bad | self._halted
        self.gate = (~bad).float()
        self._arm(bad.float())
        copy = torch.empty(3, pin_memory=self._mesh.device.type != "cpu")
        copy.copy_(torch.stack([norm, norm if total is None else total, bad.float()]), non_blocking=True)
        self._held.append(PendingStep(step, first, loss, limits, copy, _mark(self._mesh.device)))
        self._catch_up(0 if now else LAG)
        return self._found.popleft() if self._found else None

    def accepts(self, spike: Spike | None, step: int) -> bool:
        """Whether the host lets the update of this step happen; with fp16 also whether its loss scale does."""
        if spike is not None and spike.step == step + 1 and self.gate is None:
            return False
        return self._state.scale is None or self._state.scale.accept(self._norm)

    def leaves(self, spike: Spike, checkpoint: Checkpoint, log: Log) -> bool:
        """Tell of a spike. True when this step must not go on: the run has to stop, or is back at the newest
        checkpoint.
        """
        self._tell(spike, log)
        if self._answer == "skip" and self._row < MOST:
            return False
        if self._answer == "rewind" and self._rewinds[spike.step] < MOST:
            self._rewind(spike, checkpoint, log)
        else:
            self._back(spike)
            log.back(self._state.step)
            self.reason = _sentence(spike, self._stream.samples(spike.first), self._answer)
        return True

    def settle(self, log: Log) -> None:
        """At the end of the loop: hear what the device has not told yet. The state is then one to save."""
        self._catch_up(0)
        while self._found:
            spike = self._found.popleft()
            self._tell(spike, log)
            if self._answer != "skip":
                self._back(spike)
                log.back(self._state.step)

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "losses": list(self._losses), "row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for values, saved in ((self._norms, state["norms"]), (self._losses, state["losses"])):
            values.clear()
            values.extend(saved)
        self._row = state["row"]

    @property
    def _stream(self) -> Stream:
        assert self._state.stream is not None
        return self._state.stream

    def _limits(self) -> tuple[float, float]:
        """Of the norm and of the loss; nothing but nan and inf is above them while the window is not full."""
        late = (
            LAG - len(self._held) if self._gates else 0
        )  # on a GPU always the same steps count, whether the host has heard of more or not
        count = len(self._norms) - late
        if self._sigma is None or count < self._window:
            return LARGEST, LARGEST
        norms, losses = (list(values)[count - self._window : count] for values in (self._norms, self._losses))
        return limit(norms, self._sigma), limit(losses, self._sigma)

    def _judge_now(self, step: int, loss: StepLoss, norm: float, total: float) -> Spike | None:
        count = max(1, loss.count)
        if (
            self._norms and norm <= max(self._norms) and -LARGEST <= total / count <= max(self._losses)
        ):  # below any limit: no need to know it
            self._row = 0
            self._norms.append(norm)
            self._losses.append(total / count)
            return None
        limits = self._limits()
        within = norm <= limits[0] and -LARGEST <= total <= limits[1] * count
        return self._hear(
            PendingStep(step, self._stream.first, loss, limits, torch.empty(0), None), norm, total, bad=not within
        )

    def _hear(self, held: PendingStep, norm: float, total: float, *, bad: bool) -> Spike | None:
        """Take a step's numbers into the window, or say that they are a spike."""
        count = max(1, held.loss.count)
        if not bad:
            self._row = 0
            if self._sigma is not None:
                self._norms.append(norm)
                self._losses.append(total / count)
            return None
        if self._sigma is None:  # rare, and every rank is here: all have the same norm
            total = self._mesh.sum_stages(self._mesh.sum(held.loss.sums["loss"].clone().float())).item()
        mean, scale = total / count, self._state.scale
        if scale and scale.value > 1 and mean <= held.limits[1] and not math.isfinite(norm):
            return None  # fp16 ran over, and a smaller scale will do
        self._row += 1
        return Spike(held.step + 1, held.first, mean, norm, _why(norm, mean, held.limits))

    def _catch_up(self, most: int) -> None:
        """Hear of steps until at most `most` are unknown, or until one of them ends this walk."""
        while len(self._held) > most and not (self._found and self._answer != "skip"):
            held = self._held.popleft()
            if held.copied is not None:
                held.copied.synchronize()
            norm, total, bad = held.values.tolist()
            spike = self._hear(held, norm, total, bad=bool(bad))
            if spike:
                self._found.append(spike)

    def _arm(self, found: Tensor | None) -> None:
        for part in self._gates:
            part.found_inf = found  # type: ignore[attr-defined]

    def _tell(self, spike: Spike, log: Log) -> None:
        log.event("spike", answer=self._answer, **vars(spike), samples=self._stream.samples(spike.first))
        log.note(f"step {spike.step}: {spike.why}: {self._answer}")

    def _back(self, spike: Spike) -> None:
        """The step was not taken: the state is the one before it."""
        self._state.step = spike.step - 1
        self._stream.skip((), seen=spike.first)
        self._held.clear()
        self._found.clear()
        self._halted.zero_()
        for experts in balanced(self._state.model):
            experts.balance(torch.zeros_like(experts.load))  # forget what the step counted, and move nothing

    def _rewind(self, spike: Spike, checkpoint: Checkpoint, log: Log) -> None:
        """Go back to the newest checkpoint, and leave these samples out when they come again. Raises StoreError when
        there is none.
        """
        self._rewinds[spike.step] += 1
        try:
            checkpoint.wait()
        except LeaseError:
            raise
        except StoreError:  # the newest save failed: an older one stands
            pass
        self._back(spike)
        if self._state.optimizer:
            forget(self._state.optimizer)
        for module in self._wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what it gathered before would be used again
        if checkpoint.restore(self._state) is None:
            raise StoreError("on_spike=rewind: no checkpoint can be read. Type on_spike=skip and the same words again.")
        self._stream.skip([spike.first], seen=self._stream.seen)
        self._fresh = True
        log.back(self._state.step)


def gates(state: TrainState, mesh: Mesh) -> list[torch.optim.Optimizer]:
    """Torch optimizers that the device can keep from their update; none when one of any rank cannot, or when more than
    optimizers would move.
    """
    if mesh.device.type == "cpu" or any(
        parameter.device.type == "cpu" for parameter in state.model.parameters()
    ):  # reading a norm there costs nothing
        return []
    parts = inner(state.optimizer) if state.optimizer else []
    can = (
        state.scale is None
        and not balanced(state.model)
        and all(getattr(part, "_step_supports_amp_scaling", False) for part in parts)
    )
    return parts if mesh.max(torch.tensor(0.0 if can else 1.0)).item() == 0 else []


def _mark(device: torch.device) -> torch.Event | None:
    """An event after all that was given to the device so far."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event


def _why(norm: float, loss: float, limits: tuple[float, float]) -> str:
    for name, value, most in (("loss", loss, limits[1]), ("gradient norm", norm, limits[0])):
        if not math.isfinite(value):
            return f"the {name} is {value}"
        if value > most:
            return f"the {name} {value:.4g} is above {most:.4g}"
    return "the numbers are no longer finite"


def _sentence(spike: Spike, samples: Sequence[int], answer: str) -> str:
    last = spike.first + len(samples) - 1
    numbers = f"loss {spike.loss:.4g}, gradient norm {spike.norm:.4g}"
    where = (
        f"positions {spike.first} to {last} of the order, samples "
        f"{', '.join(map(str, samples[:8]))}{', ...' if len(samples) > 8 else ''}"
    )
    other = {
        "stop": "on_spike=skip to leave such steps out, or on_spike=rewind to go back to the newest checkpoint and "
        "pass over these samples"
    }
    advice = other.get(answer, f"a smaller optim.lr: {MOST} times in a row on_spike={answer} did not help")
    return f"step {spike.step}: {spike.why} ({numbers}; {where}). The state before it is saved. Type {advice}."
