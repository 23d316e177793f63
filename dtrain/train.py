"""One rank of one run, top to bottom. Everything was decided in the plan; nothing is decided here.

See the plan of a run with `python -m dtrain plan <words>`.
"""

import gc
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from dtrain import built
from dtrain.build import build
from dtrain.clip import clip
from dtrain.data.stream import Stream, as_source
from dtrain.ema import EMA
from dtrain.heldout import measure
from dtrain.hook import Hook, StepInfo, due
from dtrain.log import Log
from dtrain.looking import watch
from dtrain.mesh import Mesh
from dtrain.model import balanced, caveats, construct
from dtrain.objective import Objective
from dtrain.parallel.context import context_of
from dtrain.parallel.order import parallelize
from dtrain.plan import Plan
from dtrain.precision import Precision
from dtrain.result import Result, versions
from dtrain.schedule import set_lr
from dtrain.seeds import derive
from dtrain.state import TrainState
from dtrain.step import gradients_of, make_step, zero
from dtrain.stop import StopSignal


def train(plan: Plan) -> Result:
    """Returns the same Result on every rank, but `loss` and `metrics`, which rank 0 knows."""
    began = time.perf_counter()
    with ExitStack() as stack:
        stop_asked = stack.enter_context(StopSignal(after=plan.stop_after))
        stack.enter_context(build(plan.backend).open())
        mesh = Mesh(plan.mesh, device=plan.device)
        log = stack.enter_context(Log(plan, mesh))

        # parts
        precision: Precision = build(plan.precision)
        strategy = build(plan.strategy)
        objective: Objective = build(plan.objective)
        source = as_source(build(plan.data))
        heldout = source.holdout()
        model = construct(plan.model, facts=source.facts, seed=derive(plan.seed, "model"))
        size = sum(parameter.numel() for parameter in model.parameters())
        wrapped = parallelize(
            model, mesh, strategy, precision=precision, seed=plan.seed, pipeline=plan.pipeline, tensors=plan.tensor,
            remat=build(plan.remat), compile=build(plan.compile),
        )  # fmt: skip
        log.event("built", **built.check(plan, mesh.gather(built.inspect(model, wrapped, mesh, strategy)), precision))
        parameters, moving = gradients_of(model), balanced(model)
        ema = EMA(model, plan.ema) if plan.ema is not None else None
        optimizer = build(plan.optim, model=model)
        schedule = build(plan.schedule, steps=plan.steps)
        stream = Stream(source, batch=plan.batch, mesh=mesh, seed=derive(plan.seed, "data"), count=objective.count)
        stack.callback(stream.close)
        context = context_of(mesh, plan.context["attention"])
        step = make_step(wrapped, objective, strategy, mesh, precision=precision, seed=plan.seed, context=context)
        hooks: list[Hook] = [build(hook) for hook in plan.hooks.values()]
        forward = watch(wrapped, mesh, precision, step=plan.tokens_step)
        evaluate = partial(
            measure, wrapped, objective=objective, mesh=mesh,
            precision=precision, samples=plan.evaluate_samples, microbatch=plan.batch.microbatch, context=context, ema=ema,
        )  # fmt: skip

        # state
        state = TrainState(model, optimizer, stream, precision.scale, ema)
        checkpoint = build(plan.checkpoint, out=plan.out, mesh=mesh, resume=plan.resume)
        restored = checkpoint.restore(state)
        if plan.init and not restored:
            checkpoint.load_weights(plan.init, state)
        known = [*caveats(model), *([] if heldout else ["nothing is held out: there will be no evaluation"])]
        log.started(state.step, parameters=size, damaged=checkpoint.damaged, caveats=known)

        # loop
        metrics: dict[str, Any] = {}
        gc.collect()
        gc.freeze()  # the collector need not walk what was built above, again and again during the loop
        stack.callback(gc.unfreeze)
        log.begin(unit=objective.unit)
        while state.step < plan.steps and not stop_asked.requested(state.step, mesh):
            loss = step(stream, state.step)
            norm = clip(parameters, plan.clip, scale=precision.scale.value / mesh.batch_ranks if precision.scale else 1.0, stages=mesh.shape.pp)
            lr = set_lr(optimizer, schedule.factor(state.step))
            if precision.scale is None or precision.scale.accept(norm):
                optimizer.step()
                if ema:
                    ema.update()
            for module in moving:
                module.balance(mesh.sum)
            zero(parameters)
            state.step += 1
            log.record(state.step, stream.seen, loss.sums, loss.count, norm, lr)

            last = state.step == plan.steps
            if last or checkpoint.due(state.step):  # before anything that may fail looks at the model
                log.flush()
                log.committed(state.step, checkpoint.save(state))
            if heldout and due(plan.evaluate_every, state.step, last=last):
                log.flush()
                metrics = log.evaluated(state.step, evaluate(heldout))
            for hook in (hook for hook in hooks if due(hook.every, state.step, last=last)):
                log.flush()
                info = StepInfo(state.step, plan.steps, stream.seen, plan.seed, loss.sums["loss"], norm, lr, source, forward)
                log.saw(state.step, type(hook).__name__.lower(), hook(info) or {})
        if state.step < plan.steps:
            log.flush()
            log.committed(state.step, checkpoint.save(state))
        elif heldout and not metrics:  # the run ended after its last commit
            metrics = log.evaluated(state.step, evaluate(heldout))
        checkpoint.wait()
        status = "finished" if state.step >= plan.steps else stop_asked.status
        result = Result(status, state.step, log.last.get("loss"), time.perf_counter() - began, metrics, versions())
        log.finish(result)
        return result
