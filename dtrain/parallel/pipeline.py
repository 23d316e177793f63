"""This rank's stages, run by a schedule of torch.distributed.pipelining, or one after the other without gradients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor

from dtrain.config.facts import fact
from dtrain.errors import WordsError, first_line
from dtrain.mesh import Mesh
from dtrain.model import evaluating, own_class
from dtrain.objective import answer, logits_of
from dtrain.objective.head import Deferred, untouched
from dtrain.parallel.flow import flaw
from dtrain.parallel.stages import cut, emptied, keep, stage_of, table_of, view
from dtrain.parallel.transfers import LeanStage
from dtrain.planned import PipelineShape
from dtrain.precision import Precision
from dtrain.predict.schedule import orders

TYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
"""A dtype is sent as its index in this list, which is the same on every rank."""
MOST_DIMS = 14


class Stage(nn.Module):
    """One stage: hidden states (in the first stage the model's first input) -> hidden states (in the last logits)."""

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model, self._autocast = model, autocast
        self.keyword: str | None = None
        """The keyword of the model's first input; None: it is the first argument."""
        self._split: Any = None
        self._deferred: Deferred | None = None

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        with self._autocast():
            out = untouched(
                logits_of(self.model(**{self.keyword: x}, **others) if self.keyword else self.model(x, **others))
            )
        self._deferred = None
        if isinstance(out, Deferred):  # hidden states leave, and the loss multiplies them
            self._deferred, out = out.on(out.hidden.detach()), out.hidden
        if isinstance(out, DTensor):  # logits split over the vocabulary
            self._split, out = (out.device_mesh, out.placements, out.shape, out.stride()), out.to_local()
        if torch.is_grad_enabled() and out.is_floating_point() and not out.requires_grad:
            out = out.detach().requires_grad_()  # nothing up to here is trained; schedules want a gradient to pass on
        if out._is_view() or not out.is_contiguous():  # schedules detach it in place, and send its memory as it lies
            return out.clone(memory_format=torch.contiguous_format)
        return out

    def whole(self, out: Tensor) -> Tensor:
        """The model's output: `out` itself, the DTensor of which `out` is this rank's piece, or deferred logits."""
        if self._split is not None:
            mesh, placements, shape, stride = self._split
            out = DTensor.from_local(out, mesh, placements, run_check=False, shape=shape, stride=stride)
        return self._deferred.on(out) if self._deferred is not None else out


class Pipeline(nn.Module):
    """`Pipeline(model)` cuts `model` in place to the stages of this rank. Calling it runs all stages in turn, and
    returns the logits on every rank.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, shape: PipelineShape, precision: Precision) -> None:
        super().__init__()
        if shape.layout == "v" and torch.__version__ < "2.13":  # its stages do not find each other over gloo
            raise WordsError(
                f"pipeline.schedule={shape.schedule} needs torch 2.13 or newer, here is {torch.__version__}. Type "
                "pipeline.schedule=1f1b."
            )
        self._modes = {mode: _modes(model, mode) for mode in (False, True)}
        """Whether the model is to train -> name of a module -> its mode, as the whole model's own `train` sets it."""
        table, _ = table_of(model)
        names = cut(model, mesh.shape.pp * shape.stages, shape.split)
        self._stage_of = stage_of(model, names)
        self.owners = shape.owners(mesh.shape.pp)
        mine = [index for index, owner in enumerate(self.owners) if owner == mesh.coordinate["pp"]]
        keep(model, [name for index in mine for name in names[index]], table)
        self._autocast = partial(precision.autocast, mesh.device)
        self.stages = {index: Stage(view(model, table), self._autocast) for index in mine}
        """Number of a stage of this rank -> the stage."""
        self._modules_of_stages = nn.ModuleList(self.stages.values())
        for index in mine:
            keep(self.stages[index].model, names[index], table)
        self.shape, self._group, self._device = shape, mesh.group("pp"), mesh.device
        self._runner: Any = None
        self._sending = list[LeanStage]()
        """Stages that start their sends themselves, instead of the schedule."""
        self._checked = False
        self._loss: Callable[[Tensor, int], Tensor] = lambda output, index: output.sum()
        self._crossing: list[Tensor] = []
        """The input of each stage, and the output of the last, in the newest forward."""

    def train(self, mode: bool = True) -> "Pipeline":
        """A stage lacks modules that the `train` of its model may name, so its modes are those of the whole model."""
        self.training = mode
        for stage in self.stages.values():
            stage.training = mode
            for name, module in stage.model.named_modules():
                module.training = self._modes[mode].get(name, mode)
        return self

    def forward(self, *first: Tensor, **others: Tensor) -> Tensor:
        """No gradients cross stages here."""
        x, others = self._flow(first, others)
        self._crossing = [x]
        for index, owner in enumerate(self.owners):
            stage = self.stages.get(index)
            if stage:
                x = self._run(index, stage, x, others)
                self._crossing.append(x)
                x = answer(stage.whole(x))
            x = self._broadcast(x, owner)
            if not stage:
                self._crossing.append(x)
        self._check_flow(self._crossing[1], others)
        return x

    def step(self, inputs: Sequence[Any], loss: Callable[[Tensor, int], Tensor]) -> None:
        """Forwards and backwards of all microbatches. The rank of the last stage calls `loss(logits, index of the
        microbatch)`.

        Each of `inputs` is a tensor, keyword arguments, or a tensor and keyword arguments.
        """
        parts = [_arguments(part) for part in inputs]
        self._loss = loss
        if self._runner is None:
            self._runner = self._prepare(*parts[0], microbatches=len(parts))
        first = tuple(torch.cat(column) for column in zip(*(part[0] for part in parts), strict=True))
        x, others = self._flow(first, {name: torch.cat([part[1][name] for part in parts]) for name in parts[0][1]})
        last = {"target": torch.arange(len(parts)), "losses": []} if len(self.owners) - 1 in self.stages else {}
        self._runner.step(*((x,) if 0 in self.stages else ()), **last, **others, return_outputs=False)
        for stage in self._sending:
            stage.arrived()

    def _run(self, index: int, stage: Stage, x: Tensor, others: dict[str, Tensor]) -> Tensor:
        """A stage's forward. Before the first complete forward, an error of a later stage is blamed on the cut."""
        try:
            out: Tensor = stage(x, **others)
            return out
        except Exception as error:
            if self._checked or index == 0:
                raise
            raise WordsError(
                f"mesh.pp: stage {index} of {own_class(stage.model).__name__} fails on the output of stage "
                f"{index - 1}, {list(x.shape)}: {first_line(error)}. The first input of each module of the table "
                "`pipeline` must be the output of the module before it."
            ) from error

    def _check_flow(self, x: Tensor, others: dict[str, Tensor]) -> None:
        """Once: raises WordsError if the model treats hidden states outside of the modules of its table as no stage
        can.
        """
        if self._checked:
            return
        mine = next(iter(self.stages.values()))
        empty = Stage(emptied(mine.model), self._autocast)
        empty.keyword = mine.keyword
        wrong = flaw(empty.model, lambda x: empty(x, **others), x, self._stage_of)
        if wrong:
            raise WordsError(
                f"mesh.pp: {own_class(mine.model).__name__} {wrong}. Move that into one of the modules, or leave out "
                "mesh.pp."
            )
        self._checked = True

    def _flow(self, first: tuple[Tensor, ...], others: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The input that passes through the stages, and the inputs that every stage gets."""
        keyword = None if first else next(iter(others))
        for stage in self.stages.values():
            stage.keyword = keyword
        if keyword is None:
            return first[0], others
        return others[keyword], {name: value for name, value in others.items() if name != keyword}

    def _prepare(self, first: tuple[Tensor, ...], others: dict[str, Tensor], *, microbatches: int) -> Any:
        """The schedule. A forward of the first microbatch gives the shapes between stages."""
        with evaluating(self):
            self(*first, **others)
        shapes = [torch.empty_like(x, device="meta", requires_grad=x.is_floating_point()) for x in self._crossing]
        self._crossing = []
        stages = [
            LeanStage(
                stage, index, len(self.owners), self._device,
                input_args=(shapes[index],), output_args=(shapes[index + 1],), group=self._group,
            )
            for index, stage in self.stages.items()
        ]  # fmt: skip
        # the loss is a sum already divided by the count of the whole batch, so gradients must not be divided again
        how = {"n_microbatches": microbatches, "loss_fn": self._loss_of, "scale_grads": False}
        runner = fact(self.shape.order, "runner")
        kind = getattr(schedules, runner or "_PipelineScheduleRuntime")
        if issubclass(kind, schedules._PipelineScheduleRuntime):
            self._sending = stages
            for stage in stages:
                stage.sends = True
        if runner is None:
            return self._in_order(stages, how)
        return kind(stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages, **how)

    def _in_order(self, stages: list[LeanStage], how: Mapping[str, Any]) -> Any:
        """The actions of a schedule that torch does not have, with the transfers that they need."""
        runner = schedules._PipelineScheduleRuntime(stages, **how)
        actions: dict[int, list[schedules._Action | None]] = {
            rank: [schedules._Action(stage, schedules._ComputationType(kind), index) for kind, stage, index in mine]
            for rank, mine in enumerate(orders(self.shape, self._group.size(), how["n_microbatches"]))
        }
        runner._prepare_schedule_with_comms(actions)
        return runner

    def _loss_of(self, logits: Tensor, index: Tensor) -> Tensor:
        with self._autocast():
            return self._loss(self.stages[len(self.owners) - 1].whole(logits), int(index))

    def _broadcast(self, x: Tensor, owner: int) -> Tensor:
        """`x` of the rank `owner` of the pipeline, on all its ranks."""
        source, device = dist.get_global_rank(self._group, owner), self._device
        header = torch.tensor([TYPES.index(x.dtype), x.ndim, *x.shape, *[0] * (MOST_DIMS - x.ndim)], device=device)
        dist.broadcast(header, src=source, group=self._group)
        x = x.contiguous()
        if dist.get_rank() != source:
            dtype, ndim, *shape = header.tolist()
            x = torch.empty(shape[:ndim], dtype=TYPES[dtype], device=device)
        dist.broadcast(x, src=source, group=self._group)
        return x


def _modes(model: nn.Module, mode: bool) -> dict[str, bool]:
    model.train(mode)
    return {name: module.training for name, module in model.named_modules()}


def _arguments(inputs: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    if isinstance(inputs, tuple):
        return (inputs[0],), dict(inputs[1])
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
