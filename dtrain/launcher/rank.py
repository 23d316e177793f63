"""Runs one rank in this process: its import path, trust, threads and loop."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dtrain.build import locate, trusting
from dtrain.config import hidden
from dtrain.errors import DtrainError, WordsError
from dtrain.lifecycle import signals, unwatched, waiting
from dtrain.planned import Plan
from dtrain.result import Result


def run_here(plan: Plan, *, launcher: int | None = None) -> Result:
    """Run one rank in this process, without an agent: it reports its own failure. `launcher`: the parent process of the
    ranks of this host.
    """
    with unwatched.alone(plan.out, int(os.environ.get("RANK", 0)), launcher):
        return run_rank(plan)


def run_rank(plan: Plan, *, forked: bool = False) -> Result:
    """Run one rank in this process: import path, trust, threads, loop."""
    if os.getcwd() not in sys.path:  # noqa: PTH109 - compared as text, as sys.path holds it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    with trusting(plan.trust):
        with signals.importing(), loading_torch():
            import torch
            import torch._dynamo  # the optimizer would import it

            loop = locate(plan.loop)
        # A forked process renews its thread pool here, before two autograd threads do so at once (INTERNAL ASSERT
        # "Invalid thread pool" of the CUDA builds). The call is left out where nothing changes, because it ends MKL's
        # own choice of threads: 6% of a small GPT's step.
        if forked or plan.threads != torch.get_num_threads():
            torch.set_num_threads(plan.threads)
        torch.backends.mha.set_fastpath_enabled(False)  # its kernels ignore autocast on the CPU
        with waiting.yielding(plan.threads):
            result = loop(plan)
        if not isinstance(result, Result):
            raise DtrainError(f"loop={plan.loop} returned {type(result).__name__}; a loop returns a dtrain.Result")
        return result


@contextmanager
def loading_torch() -> Iterator[None]:
    """Import torch without the garbage collector, which would walk the new objects again and again, and freeze them
    afterwards: a sixth of the time to the first step.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    except (ImportError, AttributeError) as error:
        if sentence := hidden.by_a_file(error):
            raise WordsError(sentence) from error
        raise
    finally:
        gc.freeze()
        gc.enable()
