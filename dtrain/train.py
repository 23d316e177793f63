"""One rank of one run, top to bottom. Everything was decided in the plan; nothing is decided here.

See the plan of a run with `python -m dtrain plan <words>`.
"""

import gc
import os
import time
from contextlib import ExitStack
from functools import partial

from dtrain.build import build
from dtrain.config import environment
from dtrain.evaluation.observe import Observers
from dtrain.lifecycle.stop import StopSignal
from dtrain.lifecycle.watchdog import Watchdog
from dtrain.loop import build_check
from dtrain.loop.assemble import assemble, prepare
from dtrain.loop.metrics import Log
from dtrain.loop.spike import SpikeDetector, gates, sentence
from dtrain.loop.step import gradients_of, zero
from dtrain.loop.undo import go_back, rewind
from dtrain.mesh import Mesh
from dtrain.model import balance, balanced
from dtrain.optim.clip import clip
from dtrain.optim.step import update
from dtrain.planned import Plan
from dtrain.result import Result, peak_bytes, versions
from dtrain.schedule import set_lr


def train(plan: Plan) -> Result:
    """Returns the same Result on every rank, but `loss` and `metrics`, which rank 0 knows."""
    began, timeout, reports = time.perf_counter(), plan.backend["timeout"], os.environ.get(environment.REPORTS)
    with ExitStack() as stack:
        stop_asked = stack.enter_context(StopSignal(after=plan.stop_after, seconds=plan.stop_seconds))
        stack.enter_context(build(plan.backend).open())
        mesh = Mesh(plan.mesh, device=plan.device)
        watchdog = stack.enter_context(Watchdog(mesh, reports, timeout=timeout, batch=plan.batch.size))
        log = stack.enter_context(Log(plan, mesh))

        # parts
        checkpoint = stack.enter_context(
            build(plan.checkpoint, out=plan.out, mesh=mesh, resume=plan.resume, before_commit=log.durable)
        )
        parts = assemble(plan, mesh, brought=checkpoint.has_checkpoint() or bool(plan.init or plan.fork))
        log.event("built", **build_check.check(parts))
        model, precision, training = parts.model, parts.precision, prepare(parts, began=began)
        optimizer, schedule, stream, state = training.optimizer, training.schedule, training.stream, training.state
        stack.callback(stream.close)
        parameters, experts = gradients_of(model), balanced(model)

        # state
        spikes = state.spikes = SpikeDetector(
            plan.on_spike, **plan.spike, mesh=mesh, gates=gates(state, mesh), scale=precision.scale
        )
        restored = checkpoint.restore(state)
        if restored:
            state.began -= restored["facts"].get("seconds", 0.0)
        elif plan.fork:
            log.event("forked", source=checkpoint.load_state(plan.fork, state)["url"], step=state.step)
        elif plan.init:
            checkpoint.load_weights(plan.init, state, plan.init_names)
        parts.begin(checkpoint, state, resumed=bool(restored))
        save = log.spent.of("checkpoint_stall")(checkpoint.save)
        if not restored and (plan.fork or plan.on_spike == "rewind"):
            save(state)  # something to go back to, whatever becomes of the other run
        log.started(state, checkpoint, parameters=parts.parameters, caveats=[*parts.caveats, *stream.notes])
        enough = partial(stop_asked.meanwhile, mesh)
        observers = Observers(parts, state=state, log=log, checkpoint=checkpoint, enough=enough, watchdog=watchdog)

        # loop
        gc.collect()
        gc.freeze()  # the collector need not walk what was built above, again and again during the loop
        stack.callback(gc.unfreeze)
        log.begin(parts.objective, lambda: stream.waited)
        observers.catch_up(state.step if restored else 0)
        spiked, stopped = "", partial(stop_asked.requested, mesh=mesh)
        while state.step < plan.steps and not (spiked or observers.over or stream.ends() or stopped(state.step)):
            watchdog.begin_step(state.step, stream.seen)
            loss = training.step(stream, state.step)
            total, scale = spikes.part(loss), precision.scaled_by(mesh.batch_ranks)
            norm = clip(parameters, plan.clip, scale=scale, stages=mesh.shape.pp, beside=total, news=loss.news)
            last, due = state.step + 1 == plan.last_step, checkpoint.due(state.step + 1)
            now = observers.due(state.step + 1, stream.seen)
            decision = spikes.decide(state.step, stream.first, loss, norm, total, now=now)
            watchdog.pause_hang_detection()
            stop_asked.listen()
            if decision.spike:
                log.spike(decision.spike, plan.on_spike, stream.samples(decision.spike.first))
                if decision.action in ("rewind", "stop"):
                    if decision.action == "rewind":
                        rewind(state, decision.spike, checkpoint, parts.forward)
                    else:
                        go_back(state, decision.spike)
                        spiked = sentence(decision.spike, stream, plan.on_spike)
                    spikes.forget(restored=decision.action == "rewind")
                    log.drop_rows_after(state.step)
                    zero(parameters)
                    continue
            rates = set_lr(optimizer, schedule.factor(state.step))
            if decision.action == "apply":
                update(optimizer)
                if state.ema:
                    state.ema.update(spikes.gate)
            balance(experts, mesh.sum)
            zero(parameters)
            state.step += 1
            watchdog.resume_hang_detection()
            log.record(state.step, stream.seen, loss, norm, rates | precision.columns(), now=now)
            watchdog.pause_hang_detection()
            log.saves(checkpoint.finished_saves())
            if last or due:  # before anything that may fail looks at the model
                save(state, last=last)
                log.start()
            observers.look(state.step, stream.seen, loss, norm, rates["lr"])
        for spike in spikes.settle():
            log.spike(spike, plan.on_spike, stream.samples(spike.first))
            if plan.on_spike != "skip":
                go_back(state, spike)
                log.drop_rows_after(state.step)
        log.flush()
        if state.step:
            save(state)  # unless this step is saved
        if (state.step >= plan.last_step or observers.over or stream.over) and not observers.metrics:
            observers.evaluate(state.step)  # the last step was there before this start
        with log.spent.of("checkpoint_stall"):
            checkpoint.wait()
        log.saves(checkpoint.finished_saves())
        ended = "spiked" if spiked else stop_asked.status
        seconds, reason = time.perf_counter() - state.began, spiked or stop_asked.cause or observers.over or stream.over
        result = Result(
            status="finished" if state.step >= plan.steps else ended, step=state.step, loss=log.last.get("loss"),
            wall_seconds=seconds, metrics=observers.metrics, versions=versions(), reason=reason,
            peak_bytes=peak_bytes(plan.device), measured=observers.measured, stop=observers.stop, best=observers.best,
            spent=log.spent.in_all(),
        )  # fmt: skip
        log.finish(result)
        return result
