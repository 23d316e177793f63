"""Who starts the ranks. A launcher owns processes and restarts, and knows nothing of models."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from dtrain.build import locate, trusting
from dtrain.lifecycle import signals, unwatched, waiting
from dtrain.planned import Plan
from dtrain.result import Result


class Launcher(Protocol):
    def command(self, plan: Plan) -> str:
        """The command that is started, as `plan` prints it."""
        ...

    def launch(self, plan: Plan) -> Result:
        """Run the plan's loop on every rank. Raises RankError with the traceback of the first rank that failed."""
        ...


def run_here(plan: Plan, *, launcher: int | None = None) -> Result:
    """This process as one rank that nobody watches: it tells its own failure. `launcher` is the process that the ranks
    of this host have in common.
    """
    with unwatched.alone(plan.out, int(os.environ.get("RANK", 0)), launcher):
        return run_rank(plan)


def run_rank(plan: Plan, *, forked: bool = False) -> Result:
    """This process as one rank: import path, trust, threads, loop."""
    with trusting(plan.trust):
        return _run(plan, forked)


@contextmanager
def loading_torch() -> Iterator[None]:
    """Where a process imports torch, the collector does not walk its objects again and again while they come, nor ever
    after: a sixth of the time to the first step.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _run(plan: Plan, forked: bool) -> Result:
    if os.getcwd() not in sys.path:  # noqa: PTH109 - compared as text, as sys.path holds it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    with signals.importing(), loading_torch():
        import torch
        import torch._dynamo  # the optimizer would import it

        loop = locate(plan.loop)
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = int(said) if said.isdigit() else plan.threads
    # a forked process renews its thread pool here, before two autograd threads try to at once (INTERNAL ASSERT "Invalid
    # thread pool"
    # of the CUDA builds); where nothing changes it is left out, because it ends MKL's own choice of threads: 6% of a
    # small GPT's step
    if forked or threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    torch.backends.mha.set_fastpath_enabled(False)  # its kernels for evaluation do not know autocast on the CPU
    with waiting.yielding(threads):
        result: Result = loop(plan)
    return result
