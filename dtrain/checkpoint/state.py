"""The state that survives a restart: weights, optimizer, position in the data, loss scale, average of the weights,
window of the spike detector, step.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dtrain.config.structure import COUNT, Kind, fault
from dtrain.data.stream import Stream
from dtrain.errors import WordsError
from dtrain.model import configuration
from dtrain.model.adapted import adapter_of, added
from dtrain.optim import Optimizer
from dtrain.optim.ema import EMA
from dtrain.precision import LossScale
from dtrain.strategy.trained import Trained

POSITION = {
    "seed": Kind("an integer", lambda value: type(value) is int), "fingerprint": Kind("anything", lambda _: True),
    "seen": COUNT,
}  # fmt: skip
"""Fields of a position in the data."""


class Stateful(Protocol):
    """An object whose state is JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainState:
    """`step`: optimizer steps done. Tensors are named `model.<parameter>`, `optim.<parameter>.<entry>` and
    `ema.<parameter>`.

    `model` has plain parameter names: it is not a wrapper.
    """

    model: nn.Module
    optimizer: Optimizer | None = None
    stream: Stream | None = None
    scale: LossScale | None = None
    ema: EMA | None = None
    spikes: Stateful | None = None
    step: int = 0
    first: int = 0
    """Steps that were done by the run that this one was forked from."""
    began: float = field(default_factory=time.perf_counter)
    """Start of the run on the clock of `time.perf_counter`, moved forward by its interruptions."""
    moved: str | None = None
    """Where the base of an adapter is looked for if it is not where it was."""
    base: Mapping[str, Any] | None = None
    """The reference of the base of an adapter (base.py, others.py), once its weights are loaded; no checkpoint holds
    them again.
    """
    source: str | None = None
    """URL of the checkpoint that the weights were read from; None if they were initialised."""
    reference: Mapping[str, Any] | None = None
    """`url`, `names` and `digest` of the weights that the objective compares with; no checkpoint holds them."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what a checkpoint lacked, or had beside what was loaded."""
    _built: frozenset[str] = field(init=False, repr=False)
    _given: dict[str, int] = field(init=False, repr=False)
    """Name -> id of each parameter that the optimizer was given."""
    _trained: Trained = field(init=False, repr=False)
    _frozen: frozenset[str] = field(init=False, repr=False)
    """The tensors that are not trained."""

    def __post_init__(self) -> None:
        self._built = frozenset(name for name, _ in self._model_tensors())
        saved = {id(each) for each in self.model.state_dict(keep_vars=True).values()}
        parameters = self.model.named_parameters()
        if lost := [name for name, each in parameters if each.requires_grad and id(each) not in saved]:
            raise WordsError(
                f"model: its state_dict leaves out parameters that are trained: {', '.join(lost[:5])}. No checkpoint "
                "would have them. Leave out frozen parameters alone."
            )
        self._given = {name: id(each) for name, each in self.model.named_parameters() if self.optimizer}
        self._trained = Trained(self.model)
        named = self.model.named_parameters(remove_duplicate=False)
        self._frozen = frozenset(f"model.{name}" for name, each in named if not each.requires_grad)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name. Raises WordsError as `check`."""
        self.check()
        left = self._left_out()
        averages = {f"ema.{name}": average for name, average in self.ema.averages.items()} if self.ema else {}
        return (
            {name: tensor for name, tensor in self._model_tensors() if name not in left}
            | {name: value for name, value in self._optimizer_entries() if isinstance(value, Tensor)}
            | averages
        )

    def weights(self, *, of_base: bool = False) -> dict[str, Tensor]:
        """The tensors of the model that a checkpoint holds; `of_base`: those that are not of the adapter."""
        if not of_base:
            return {name: tensor for name, tensor in self.tensors().items() if name.startswith("model.")}
        others = {f"model.{name}" for name in added(self.model)}
        return {name: tensor for name, tensor in self._model_tensors() if name not in others}

    @property
    def adapter(self) -> Mapping[str, Any] | None:
        """The facts of the adapter of the model."""
        return adapter_of(self.model)

    def check(self) -> None:
        """Raises WordsError if the model gained, lost or replaced tensors since it was built, which would be neither
        trained nor loaded, or unfroze parameters.
        """
        names = {name for name, _ in self._model_tensors()}
        if other := sorted(name.removeprefix("model.") for name in names ^ self._built):
            raise WordsError(
                f"the model gained or lost parameters or buffers while it trained: {', '.join(other[:5])}. Create them "
                "in __init__, or with persistent=False."
            )
        parameters = self.model.named_parameters()
        if new := [name for name, each in parameters if id(each) != self._given.get(name, id(each))]:
            raise WordsError(
                f"the model replaced parameters while it trained: {', '.join(new[:5])}. The optimizer still trains the "
                "old ones. Change a parameter in place: with torch.no_grad(): parameter.copy_(values)."
            )
        if self.optimizer:
            self._trained.check()

    def facts(self) -> dict[str, Any]:
        """The state that is not in tensors, as JSON."""
        return {
            "step": self.step,
            "first": self.first,
            "seconds": time.perf_counter() - self.began,
            "stream": self.stream.state_dict() if self.stream else None,
            "scale": self.scale.state_dict() if self.scale else None,
            "spikes": self.spikes.state_dict() if self.spikes else None,
            "huggingface": configuration(self.model),
            "as_transformers": getattr(self.model, "as_transformers", None),
            "tied": self.tied(),
            "adapter": self.adapter,
            "base": self.base,
            "reference": self.reference,
            "resting": self._trained.resting(),
            "optim": {name: value for name, value in self._optimizer_entries() if not isinstance(value, Tensor)},
        }

    def unfit(self, facts: Mapping[str, Any]) -> str:
        """Why the facts of a checkpoint cannot be loaded; empty if they can. Its optimizer states have been made."""
        if self.stream and (problem := fault(facts.get("stream"), POSITION, "facts.stream")):
            return problem
        parameters = dict(self.model.named_parameters())
        for name, value in facts["optim"].items():
            parameter, _, entry = name.removeprefix("optim.").rpartition(".")
            if not name.startswith("optim.") or not parameter or isinstance(value, dict):
                return f"facts.optim has {name[:80]!r}, which is no value of a parameter"
            here = self.optimizer.state.get(parameters.get(parameter), {}) if self.optimizer else {}
            kinds = {type(each) for each in (here.get(entry, value), value)}
            if len(kinds) > 1 and not kinds <= {int, float}:
                return f"facts.optim has {name[:80]!r} as {value!r:.40}, which is another kind of value here"
        return ""

    def load_facts(self, facts: dict[str, Any]) -> None:
        """Raises WordsError if the checkpoint was trained on other data."""
        if self.stream:
            self.stream.load_state_dict(facts["stream"])
        if self.scale and facts.get("scale"):
            self.scale.load_state_dict(facts["scale"])
        if self.spikes and facts.get("spikes"):
            self.spikes.load_state_dict(facts["spikes"])
        parameters = dict(self.model.named_parameters())
        for name, value in facts["optim"].items():
            parameter, entry = name.removeprefix("optim.").rsplit(".", 1)
            if self.optimizer and parameter in parameters:  # else it is on another pipeline stage
                self.optimizer.state[parameters[parameter]][entry] = value
        self.step, self.first = facts["step"], facts.get("first", 0)
        self.reference = facts.get("reference")
        self._trained.rest(facts.get("resting", ()))

    def make_room(self, saved: Iterable[str]) -> None:
        """Make the optimizer create its state, by a step with zero gradients and learning rates.

        Only for parameters with a state among the `saved` names: those without gradients have none.
        """
        if self.optimizer is None:
            return
        reached = {name.removeprefix("optim.").rsplit(".", 1)[0] for name in saved if name.startswith("optim.")}
        begun = {id(parameter) for name, parameter in self.model.named_parameters() if name in reached}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if id(parameter) in begun else None
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            for parameter in group["params"]:
                parameter.grad = None

    def _model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        persistent = self.model.state_dict(keep_vars=True)
        seen: set[int] = set()
        for name, tensor in persistent.items():
            if isinstance(tensor, Tensor) and id(tensor) not in seen:  # tied weights are saved once
                seen.add(id(tensor))
                yield f"model.{name}", tensor.detach()

    def _left_out(self) -> set[str]:
        """The weights that the base has."""
        return set(self._frozen) if self.base else set()

    def tied(self) -> dict[str, str]:
        """Further name of a tied weight -> the name under which it is saved."""
        named = self.model.named_parameters(remove_duplicate=False)
        first: dict[int, str] = {}
        names = [(name, first.setdefault(id(parameter), name)) for name, parameter in named]
        return {name: saved for name, saved in names if name != saved}

    def _optimizer_entries(self) -> Iterator[tuple[str, Any]]:
        if self.optimizer is None:
            return
        state = self.optimizer.state
        for name, parameter in self.model.named_parameters():
            for entry, value in state.get(parameter, {}).items():
                if value is not None:
                    yield f"optim.{name}.{entry}", value
