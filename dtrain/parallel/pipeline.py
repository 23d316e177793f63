"""The stages that this rank holds, run by a schedule of torch.distributed.pipelining, or one after the other without
gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

from dtrain.config.facts import fact
from dtrain.errors import WordsError, first_line
from dtrain.mesh import Mesh
from dtrain.model import evaluating
from dtrain.objective import answer, logits_of
from dtrain.parallel.stages import cut, emptied, keep, table_of, view
from dtrain.planned import PipelineShape
from dtrain.precision import Precision
from dtrain.predict.schedule import orders

TYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
"""A type travels as its place in this list, which is the same on every rank."""
MOST_DIMS = 14


class Stage(nn.Module):
    """One stage: hidden states (or, in the first, the model's first input) -> hidden states (or, in the last,
    logits).
    """

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model, self._autocast = model, autocast
        self.keyword: str | None = None
        """Under which name the model takes its first input; None: as its first argument."""
        self._split: Any = None

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        with self._autocast():
            out = logits_of(self.model(**{self.keyword: x}, **others) if self.keyword else self.model(x, **others))
        if isinstance(out, DTensor):  # logits split over the vocabulary
            self._split, out = (out.device_mesh, out.placements, out.shape, out.stride()), out.to_local()
        return out.clone() if out._is_view() else out  # schedules detach it in place

    def whole(self, out: Tensor) -> Tensor:
        """The model's output, of which `out` is this rank's piece: itself, or a DTensor."""
        if self._split is None:
            return out
        mesh, placements, shape, stride = self._split
        return DTensor.from_local(out, mesh, placements, run_check=False, shape=shape, stride=stride)


class Pipeline(nn.Module):
    """`Pipeline(model)` cuts `model`, in place, to the stages of this rank. To call it runs all stages in turn; every
    rank gets the logits.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, shape: PipelineShape, precision: Precision) -> None:
        super().__init__()
        if shape.layout == "v" and torch.__version__ < "2.13":  # its stages do not find each other over gloo
            raise WordsError(
                f"pipeline.schedule={shape.schedule} needs torch 2.13 or newer, here is {torch.__version__}. Type "
                "pipeline.schedule=1f1b."
            )
        table, _ = table_of(model)
        names = cut(model, mesh.shape.pp * shape.stages, shape.split)
        self.owners = shape.owners(mesh.shape.pp)
        mine = [index for index, owner in enumerate(self.owners) if owner == mesh.coordinate["pp"]]
        keep(model, [name for index in mine for name in names[index]], table)
        autocast = partial(precision.autocast, mesh.device)
        self.stages = nn.ModuleDict({str(index): Stage(view(model, table), autocast) for index in mine})
        for index in mine:
            keep(self._stage(index).model, names[index], table)
        self.shape, self._group, self._device, self._autocast = shape, mesh.group("pp"), mesh.device, autocast
        self._runner: Any = None
        self._checked = False
        self._loss: Callable[[Tensor, int], Tensor] = lambda output, index: output.sum()
        self._passed: list[Tensor] = []

    def forward(self, *first: Tensor, **others: Tensor) -> Tensor:
        """No gradients cross stages here."""
        x, others = self._flow(first, others)
        self._passed = [x]
        for index, owner in enumerate(self.owners):
            mine = str(index) in self.stages
            if mine:
                x = self._first_try(index, x, others)
                self._passed.append(x)
                x = answer(self._stage(index).whole(x))
            x = self._hand_round(x, owner)
            if not mine:
                self._passed.append(x)
        self._check_flow(self._passed[1], others)
        return x

    def step(self, inputs: Sequence[Any], loss: Callable[[Tensor, int], Tensor]) -> None:
        """Forwards and backwards of all microbatches. `loss(logits, index of the microbatch)` is called where the last
        stage is.

        Each of `inputs` is a tensor, keyword arguments, or a tensor and keyword arguments.
        """
        parts = [_arguments(part) for part in inputs]
        self._loss = loss
        if self._runner is None:
            self._runner = self._prepare(*parts[0], microbatches=len(parts))
        first = tuple(torch.cat(column) for column in zip(*(part[0] for part in parts), strict=True))
        x, others = self._flow(first, {name: torch.cat([part[1][name] for part in parts]) for name in parts[0][1]})
        here = {int(index) for index in self.stages}
        last = {"target": torch.arange(len(parts)), "losses": []} if len(self.owners) - 1 in here else {}
        self._runner.step(*((x,) if 0 in here else ()), **last, **others, return_outputs=False)

    def roots(self) -> list[nn.Module]:
        """The stages of this rank, first to last."""
        return list(self.stages.values())

    def _first_try(self, index: int, x: Tensor, others: dict[str, Tensor]) -> Tensor:
        """A stage's forward. Until one has gone through all stages, what fails behind the first is the cut, not the
        model.
        """
        try:
            out: Tensor = self._stage(index)(x, **others)
            return out
        except Exception as error:
            if self._checked or index == 0:
                raise
            raise WordsError(
                f"mesh.pp: stage {index} of {type(self._stage(index).model).__name__} fails on what stage {index - 1} "
                f"hands on, {list(x.shape)}: "
                f"{first_line(error)}. Each module of the table `pipeline` must take what the one before it gives, as "
                "its first input."
            ) from error

    def _check_flow(self, x: Tensor, others: dict[str, Tensor]) -> None:
        """Once: raises WordsError when the model changes what flows from stage to stage outside of the modules of its
        table.
        """
        if self._checked:
            return
        mine = next(iter(self.stages.values()))
        assert isinstance(mine, Stage)
        empty = Stage(emptied(mine.model), self._autocast)
        empty.keyword = mine.keyword
        out = empty(x, **others)
        if out.shape != x.shape or not torch.equal(out, x):
            raise WordsError(
                f"mesh.pp: {type(mine.model).__name__} changes what flows outside of the modules of its table, and "
                "every stage would do so again. "
                "Move that into one of the modules, or leave mesh.pp out."
            )
        self._checked = True

    def _flow(self, first: tuple[Tensor, ...], others: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The input that flows through the stages, and those that every stage is given."""
        keyword = None if first else next(iter(others))
        for index in self.stages:
            self._stage(int(index)).keyword = keyword
        return (
            (first[0], others)
            if keyword is None
            else (others[keyword], {name: value for name, value in others.items() if name != keyword})
        )

    def _prepare(self, first: tuple[Tensor, ...], others: dict[str, Tensor], *, microbatches: int) -> Any:
        """The schedule. The shapes that cross stages are seen by one forward of the first microbatch."""
        with evaluating(self):
            self(*first, **others)
        shapes = [torch.empty_like(x, device="meta", requires_grad=x.is_floating_point()) for x in self._passed]
        self._passed = []
        stages = [
            PipelineStage(
                self._stage(int(index)), int(index), len(self.owners), self._device,
                input_args=(shapes[int(index)],), output_args=(shapes[int(index) + 1],), group=self._group,
            )
            for index in self.stages
        ]  # fmt: skip
        # the loss is a sum already divided by what counts in the whole batch, so gradients must not be divided again
        how = {"n_microbatches": microbatches, "loss_fn": self._loss_of, "scale_grads": False}
        runner = fact(self.shape.order, "runner")
        if runner is None:
            return self._in_order(stages, how)
        kind = getattr(schedules, runner)
        return kind(stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages, **how)

    def _in_order(self, stages: list[PipelineStage], how: Mapping[str, Any]) -> Any:
        """The actions of a schedule that is none of torch's, with the transfers that they need."""
        pp, count = self._group.size(), how["n_microbatches"]
        runner = schedules._PipelineScheduleRuntime(stages, **how)
        runner._prepare_schedule_with_comms(
            {
                rank: [
                    schedules._Action(action.stage, schedules._ComputationType(action.kind), action.microbatch)
                    for action in mine
                ]
                for rank, mine in enumerate(orders(self.shape, pp, count))
            }
        )
        return runner

    def _loss_of(self, logits: Tensor, index: Tensor) -> Tensor:
        with self._autocast():
            return self._loss(self._stage(len(self.owners) - 1).whole(logits), int(index))

    def _stage(self, index: int) -> Stage:
        stage = self.stages[str(index)]
        assert isinstance(stage, Stage)
        return stage

    def _hand_round(self, x: Tensor, owner: int) -> Tensor:
        """`x` of the rank `owner` of the pipeline, on all its ranks."""
        source = dist.get_global_rank(self._group, owner)
        header = torch.tensor(
            [TYPES.index(x.dtype), x.ndim, *x.shape, *[0] * (MOST_DIMS - x.ndim)], device=self._device
        )
        dist.broadcast(header, src=source, group=self._group)
        dtype, ndim, *shape = header.tolist()
        x = (
            x.contiguous()
            if dist.get_rank() == source
            else torch.empty(shape[:ndim], dtype=TYPES[dtype], device=self._device)
        )
        dist.broadcast(x, src=source, group=self._group)
        return x


def _arguments(inputs: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    if isinstance(inputs, tuple):
        return (inputs[0],), dict(inputs[1])
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
