"""One rank of one run, top to bottom. Everything was decided in the plan; nothing is decided here.

See the plan of a run with `python -m dtrain plan <words>`.
"""

import gc
import os
import time
from contextlib import ExitStack
from functools import partial

from dtrain.build import build
from dtrain.checkpoint.state import TrainState
from dtrain.data.stream import Stream, as_source
from dtrain.evaluation.observe import Observers
from dtrain.lifecycle.slowdown import Slowdown
from dtrain.lifecycle.stop import StopSignal
from dtrain.lifecycle.watchdog import Watchdog
from dtrain.loop import build_check
from dtrain.loop.metrics import Log
from dtrain.loop.spike import SpikeDetector
from dtrain.loop.step import gradients_of, make_step, zero
from dtrain.mesh import Mesh
from dtrain.model import balance, balanced, caveats, construct
from dtrain.model.seeds import derive
from dtrain.objective import Objective
from dtrain.optim import Optimizer
from dtrain.optim.clip import clip
from dtrain.optim.ema import EMA
from dtrain.parallel.context import context_of
from dtrain.parallel.order import parallelize
from dtrain.plan import Plan
from dtrain.precision import Precision
from dtrain.result import Result, peak_bytes, versions
from dtrain.schedule import Schedule, set_lr


def train(plan: Plan) -> Result:
    """Returns the same Result on every rank, but `loss` and `metrics`, which rank 0 knows."""
    began = time.perf_counter()
    with ExitStack() as stack:
        stop_asked = stack.enter_context(StopSignal(after=plan.stop_after, seconds=plan.stop_seconds))
        stack.enter_context(build(plan.backend).open())
        mesh = Mesh(plan.mesh, device=plan.device)
        watchdog = stack.enter_context(
            Watchdog(mesh, os.environ.get("DTRAIN_REPORTS"), timeout=plan.backend["timeout"], batch=plan.batch.size)
        )
        log = stack.enter_context(Log(plan, mesh))

        # parts
        precision: Precision = build(plan.precision)
        strategy = build(plan.strategy)
        objective: Objective = build(plan.objective, Objective)
        source = as_source(build(plan.data))
        model = construct(plan.model, facts=source.facts, seed=derive(plan.seed, "model"))
        checkpoint = stack.enter_context(
            build(plan.checkpoint, out=plan.out, mesh=mesh, resume=plan.resume, before_commit=log.durable)
        )
        size = sum(parameter.numel() for parameter in model.parameters())
        wrapped = parallelize(
            model, mesh, strategy, precision=precision, seed=plan.seed, pipeline=plan.pipeline, tensors=plan.tensor,
            remat=build(plan.remat), compile=build(plan.compile), brought=checkpoint.brings() or bool(plan.init),
        )  # fmt: skip
        log.event(
            "built",
            **build_check.check(plan, mesh.gather(build_check.inspect(model, wrapped, mesh, strategy)), precision),
        )
        parameters, moving = gradients_of(model), balanced(model)
        ema = EMA(model, plan.ema) if plan.ema is not None else None
        optimizer = build(plan.optim, Optimizer, model=model)
        schedule = build(plan.schedule, Schedule, steps=plan.steps)
        stream = Stream(source, batch=plan.batch, mesh=mesh, seed=derive(plan.seed, "data"), count=objective.count)
        stack.callback(stream.close)
        context = context_of(mesh, plan.context["attention"])
        step = make_step(wrapped, objective, strategy, mesh, precision=precision, seed=plan.seed, context=context)

        # state
        state = TrainState(model, optimizer, stream, precision.scale, ema, began=began)
        guard = state.guard = SpikeDetector(plan.on_spike, **plan.spike, mesh=mesh, state=state, wrapped=wrapped)
        restored = checkpoint.restore(state)
        if restored:
            state.began -= restored["facts"].get("seconds", 0.0)
        elif plan.init:
            checkpoint.load_weights(plan.init, state)
        guard.begin(checkpoint, restored=bool(restored))
        log.started(
            state.step,
            parameters=size,
            damaged=checkpoint.damaged,
            passed_over=checkpoint.passed_over,
            caveats=caveats(model),
        )
        observers = Observers(
            plan, model, wrapped, source, objective, mesh,
            precision=precision, context=context, ema=ema, log=log, scored=checkpoint.scored, enough=partial(stop_asked.meanwhile, mesh),
            watchdog=watchdog,
        )  # fmt: skip

        # loop
        gc.collect()
        gc.freeze()  # the collector need not walk what was built above, again and again during the loop
        stack.callback(gc.unfreeze)
        log.begin(objective, Slowdown(lambda: stream.waited))
        while state.step < plan.steps and not guard.reason and not stop_asked.requested(state.step, mesh):
            watchdog.beat(state.step, stream.seen)
            loss = step(stream, state.step)
            total = guard.listen(loss)
            norm = clip(
                parameters, plan.clip, scale=precision.scaled_by(mesh.batch_ranks), stages=mesh.shape.pp, beside=total
            )
            last, due = state.step + 1 == plan.steps, checkpoint.due(state.step + 1)
            spike = guard.judge(state.step, loss, norm, total, now=last or due)
            watchdog.rest()
            stop_asked.done()
            if spike and guard.leaves(spike, checkpoint, log):
                zero(parameters)
                continue
            rates = set_lr(optimizer, schedule.factor(state.step))
            if guard.accepts(spike, state.step):
                optimizer.step()
                if ema:
                    ema.update(guard.gate)
            balance(moving, mesh.sum)
            zero(parameters)
            state.step += 1
            watchdog.part()
            log.record(state.step, stream.seen, loss.sums, loss.count, norm, rates, now=last or due)
            watchdog.rest()
            log.saves(checkpoint.landed())
            if last or due:  # before anything that may fail looks at the model
                checkpoint.save(state, last=last)
                log.start()
            observers.look(state.step, stream.seen, loss, norm, rates["lr"])
        guard.settle(log)
        if state.step >= plan.steps and not observers.metrics:  # it was complete before this start
            observers.evaluate(state.step)
        elif 0 < state.step < plan.steps:
            log.flush()
            checkpoint.save(state)
        checkpoint.wait()
        log.saves(checkpoint.landed())
        status = "finished" if state.step >= plan.steps else "spiked" if guard.reason else stop_asked.status
        seconds, reason = time.perf_counter() - state.began, guard.reason or stop_asked.cause
        result = Result(
            status,
            state.step,
            log.last.get("loss"),
            seconds,
            observers.metrics,
            versions(),
            reason,
            peak_bytes(plan.device),
        )
        log.finish(result)
        return result
