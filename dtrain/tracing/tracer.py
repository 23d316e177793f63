"""Traces a model once on tensors without memory: weights, activations and operations of each block.

    dtrain plan model._target_=mypkg.Model trust=[mypkg] data=...

One sample goes forward and backward under FakeTensorMode
(https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html): no process group, no GPU, no memory for weights;
dtrain/tracing/notes.py records it. The operators are those of the CPU even for a run on a GPU, but for RMS norms.
If a forward depends on values of tensors, which do not exist, only the weights are known.
"""

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import transformer
from torch.utils._pytree import tree_map_only

from dtrain import secrets
from dtrain.build import build
from dtrain.config import environment
from dtrain.config.facts import about
from dtrain.data.stream import as_source
from dtrain.errors import DtrainError, PreflightError, StoreError, WordsError, first_line
from dtrain.lifecycle.stacks import own
from dtrain.loop.step import call
from dtrain.model import blocks, construct, saved_buffers
from dtrain.model.adapted import lacks_memory, packed
from dtrain.model.seeds import fill
from dtrain.objective import Compared, Objective, chunk_asked, logits_of, loss_of, prepared, redirected
from dtrain.objective.head import Deferred, defer, deferring, untouched
from dtrain.parallel.order import lower, materialize
from dtrain.planned import Plan
from dtrain.precision import Precision
from dtrain.predict.activations import STYLES
from dtrain.predict.shapes import LayoutBytes, Shapes, Split, runs
from dtrain.predict.state_bytes import flowing, holding_of
from dtrain.tracing import notes
from dtrain.tracing.blocks import blocks_of, style_of
from dtrain.tracing.notes import Listener, Part, Watch
from dtrain.tracing.tensors import nbytes, tensors_of

# the stack of an operator that fails without memory; the plan says which line of the model called it
logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)

UNREAD = "the data cannot be read here"
FAILURES = Exception, SystemExit
"""Whatever code of others raises; it may also end the process."""
VALUE_ERRORS = (DataDependentOutputException, GuardOnDataDependentSymNode)
"""Errors of a forward that depends on values of tensors."""


def trace(plan: Plan, *, real: bool = False) -> tuple[Shapes, nn.Module | None]:
    """The shapes, and the built model (None if it cannot be built). `real`: use tensors with memory, for a small model
    whose forward depends on values.

    If the forward fails, or the data is missing, `Shapes.unknown` gives the reason. A model that cannot be built is
    such a reason in a plan for another machine; in one for this machine it raises WordsError.
    """
    one = _sample(plan)
    unknown = one.unknown
    fake = None if real else FakeTensorMode(allow_non_fake_inputs=True)
    with fake or nullcontext():
        try:
            model = _built(plan, one.facts, fake)
        except DtrainError:
            if unknown and "auto" in plan.model.values():  # the data would decide these arguments
                return Shapes((), unknown=unknown, refused=one.refused), None
            raise
        except FAILURES as error:
            why = f"the model cannot be built here: {_why(error)}"
            if "cluster" in plan.why and not unknown:
                raise WordsError(f"{why}. DTRAIN_DEBUG=1 shows the whole stack.") from error
            return Shapes((), unknown=unknown or why, refused=one.refused), None
        defer(model, chunk_asked(build(plan.objective, Objective)))
        _lower(model, plan, real=real)
        batch = tree_map_only(Tensor, lambda each: fake.from_tensor(each) if fake else each, one.batch)
        samples = tensors_of(batch)
        listed = list(dict.fromkeys(blocks(model)))
        before = [(module, buffer, buffer._version) for module, _, buffer in saved_buffers(model)]
        watch = Watch(model, samples)
        if not unknown:
            unknown = _step(plan, model, batch, listed, watch)
            watch = Watch(model, samples) if unknown else watch
    parts = blocks_of(model, listed, watch, known=not unknown, size=flowing(plan).param)
    shapes = Shapes(
        blocks=runs(parts),
        buffers=sum(each.nbytes for each in model.buffers()),
        saved=_persistent(model),
        tables=watch.tables,
        sample=sum(each.nbytes for each in samples),
        tokens=_tokens(plan, one.batch.get("targets")),
        inputs=sum(each.nbytes for each in tensors_of(one.batch.get("inputs"))),
        returns=watch.returns,
        moving=_moving(before),
        unknown=unknown,
        saved_buffers=len(before),
        refused=one.refused,
    )
    return shapes, model


def _lower(model: nn.Module, plan: Plan, *, real: bool) -> None:
    """Give the model memory (none under the fake mode) and the dtypes of the precision."""
    precision = build(plan.precision)
    if lacks_memory(model) or (not real and packed(model)):
        materialize(model, torch.device("cpu"), whole=not real)
        if real:
            fill(model, plan.seed)
    if precision.param != torch.float32:
        lower(model, precision.param)
    if holding_of(plan).shards and precision.compute != precision.param:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(precision.compute)


def _step(plan: Plan, model: nn.Module, batch: Any, listed: list[nn.Module], watch: Watch) -> str:
    """Run one forward and backward under `watch`. Returns why it failed, or an empty text. Raises DtrainError."""
    objective, precision = build(plan.objective, Objective), build(plan.precision)
    model = redirected(objective, model)
    try:
        with (
            _without_collector(),
            _causal_masks(),
            _listening(model, listed, watch),
            watch,
            Listener(watch, fused=plan.device != "cpu"),
            saved_tensors_hooks(watch.pack, watch.unpack),
        ):
            with deferring(chunk_asked(objective)), precision.autocast(torch.device("cpu")):
                out = call(model, objective.inputs(batch))
                logits = untouched(logits_of(out))
                if isinstance(logits, Deferred):
                    watch.chunked(logits)
                else:
                    watch.returns = LayoutBytes(logits=nbytes(logits))
                loss = loss_of(objective, out, _compared(objective, out, batch)).sum
                del out, logits
            watch.begin_backward(loss)
            loss.backward()
    except DtrainError as error:
        if not _takes_two(model, objective, precision, batch):
            raise
        return f"the forward takes no batch of one sample: {first_line(error)}"
    except VALUE_ERRORS as error:
        return f"the forward reads values of tensors, which a trace does not have, at {own(_frames(error))}"
    except FAILURES as error:  # whatever else the user's forward does
        return f"the forward fails on tensors without memory: {_why(error)}"
    return ""


def _built(plan: Plan, facts: Mapping[str, Any], fake: FakeTensorMode | None) -> nn.Module:
    """The model without memory. If its constructor depends on values, and the plan is for this machine, it is built
    with memory, which is then released.
    """
    try:
        return construct(plan.model, facts=facts, seed=0, adapter=plan.adapter)
    except DtrainError:
        raise
    except Exception:
        if fake is None or "cluster" not in plan.why:
            raise
    with unset_fake_temporarily():
        model = construct(plan.model, facts=facts, seed=0, adapter=plan.adapter)
    light: dict[Tensor, Any] = {
        each: fake.from_tensor(each) for each in (*model.parameters(), *model.buffers())
    }  # each once: modules may share it
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: light[each] for name, each in tensors.items() if each is not None})
    return model


@dataclass(frozen=True)
class Sample:
    """A `batch` of one sample with real values, and `facts` about the data. `unknown`: why there is no sample;
    `refused`: what about the data would stop a run.
    """

    batch: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    unknown: str = ""
    refused: str = ""


def _sample(plan: Plan) -> Sample:
    try:
        source = prepared(build(plan.objective, Objective), as_source(build(plan.data)), plan.seed)
        return Sample(source.take(np.array([0]), np.array([0])), source.facts)
    except WordsError:
        raise
    except StoreError as error:
        return Sample(unknown=f"{UNREAD}: {_why(error)}")
    except PreflightError as error:
        return Sample(unknown=UNREAD, refused=" ".join(error.problems))
    except FAILURES as error:
        return Sample(unknown=f"{UNREAD}: {_why(error)}")


def _takes_two(model: nn.Module, objective: Objective, precision: Precision, batch: Any) -> bool:
    """Whether a forward works with the same sample twice: some models squeeze the dim of a batch of one."""
    twice = tree_map_only(Tensor, lambda each: torch.cat([each, each]), batch)
    try:
        with precision.autocast(torch.device("cpu")):
            out = call(model, objective.inputs(twice))
            loss_of(objective, out, _compared(objective, out, twice))
    except FAILURES:
        return False
    return True


@contextmanager
def _causal_masks() -> Iterator[None]:
    """torch's transformers look into the values of a mask; in a trace each is taken as causal, unless they are told."""
    detect = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: (
        mask is not None if is_causal is None else is_causal
    )
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect


@contextmanager
def _without_collector() -> Iterator[None]:
    """Tensors in cycles would live as long as the process happens to let them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _compared(objective: Objective, out: Any, batch: Any) -> Any:
    """`batch` with what an objective that compares would find there, of the model's own outputs."""
    if not isinstance(objective, Compared):
        return batch
    with torch.no_grad():
        return {**batch, "reference": objective.reference(out, batch).detach()}


def _why(error: BaseException) -> str:
    """The error and its place in the code, as text."""
    if os.environ.get(environment.DEBUG):
        raise error
    place = own(_frames(error))
    where = f", at {place}" if place and "dtrain" not in place.split("/")[0] else ""
    return secrets.masked(f"{type(error).__name__}: {first_line(error)}") + where


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    ours = __file__, notes.__file__
    return [(frame, line) for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename not in ours]


def _tokens(plan: Plan, targets: Any) -> int:
    """Targets per sample: the length of a sequence, of two of a pair, otherwise 1."""
    if isinstance(targets, Tensor) and about(plan.objective).get("pairs"):
        return targets[0].numel()
    is_sequence = isinstance(targets, Tensor) and targets.ndim == 2 and not targets.is_floating_point()
    return int(targets.shape[1]) if is_sequence else 1


@contextmanager
def _listening(model: nn.Module, listed: list[nn.Module], watch: Watch) -> Iterator[None]:
    """Hooks that tell `watch` when blocks begin and end, and how tensor parallelism splits the outputs of modules."""
    names, hooks = {id(module): name for name, module in model.named_modules()}, list[Any]()
    for module in listed:
        part = Part(names[id(module)], True)
        before = partial(watch.enter, part)
        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(watch.leave, part)))
    for module in model.modules():
        name = names[id(module)]
        style = style_of(model, name)
        if style in STYLES:
            hooks.append(module.register_forward_hook(partial(_split, watch, name, style)))
        if any(True for _ in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(partial(watch.reach, name)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(watch.settle))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _split(watch: Watch, name: str, style: str, module: nn.Module, args: Any, out: Any) -> None:
    """A forward hook of a module that the model's `tp_plan` names."""
    received, returned = tensors_of(args), tensors_of(out)
    inputs, outputs = (sum(each.numel() for each in some) for some in (received, returned))
    grad_in, grad_out = (any(each.requires_grad for each in some) for some in (received, returned))
    watch.part.splits.append(
        Split(
            name=name,
            style=style,
            inputs=inputs,
            outputs=outputs,
            width=returned[0].shape[-1],
            grad_in=grad_in,
            grad_out=grad_out,
            summed=_continues(module, nn.Embedding),
            twice=style == "rowwise" and _continues(module, nn.Linear),
        )
    )
    if not isinstance(out, Deferred):
        watch.mark(out, STYLES[style][0])


def _continues(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a class derived from `kind` processes its result further; on a rank that is only a part of a sum."""
    return isinstance(module, kind) and type(module).forward is not kind.forward


def _moving(before: list[tuple[nn.Module, Tensor, int]]) -> tuple[tuple[bool, int], ...]:
    """(is floating, bytes) for each dtype, over the buffers of modules whose forward changed a buffer."""
    touched = {id(module) for module, buffer, version in before if buffer._version != version}
    sizes = Counter[torch.dtype]()
    for module, buffer, _ in before:
        sizes[buffer.dtype] += buffer.nbytes * (id(module) in touched)
    return tuple((dtype.is_floating_point, size) for dtype, size in sizes.items() if size)


def _persistent(model: nn.Module) -> int:
    """Bytes of the buffers in a checkpoint."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sum(
        value.nbytes for name, value in model.state_dict().items() if name not in weights and isinstance(value, Tensor)
    )
