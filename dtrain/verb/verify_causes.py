"""Causes of a difference that `dtrain verify` found, as the runs show it: (kind, sentence)."""

from collections.abc import Iterator, Sequence
from typing import Any

from dtrain.verb import verify_runs
from dtrain.verb.verify_runs import Refused, Runs

Cause = tuple[str, str]
PROCESS = (
    "on its process or time (os.getpid(), the clock), or on hash() of text or the order of a set, which differ between "
    "interpreters"
)
SPLIT = (
    "the split over ranks causes the difference. This happens if a model or objective uses its rank, or keeps sums "
    "over its own rank's samples; if yours does neither, it is a bug in dtrain."
)


def refused(runs: Runs, error: Refused) -> dict[str, Any]:
    """The report of a run that does not go on after its stop."""
    from dtrain.evaluation import parity

    asked, one, again = map(runs.where, ("asked", "one", "again"))
    other = parity.other_sample(asked, one)
    why = f"stopped after step {runs.stop}, the run does not go on: {error.cause}"
    alone = parity.other_sample(again, one) is None
    kind = ("data", _of_sample(*other, alone=alone)) if other else ("resume", why)
    return {"same": False, "first": f"the data after step {runs.stop}", "rows": [], "built": [], "kinds": [kind]}


def _of_sample(sample: int, rank: int, *, alone: bool) -> str:
    """`alone`: two runs of one process read the same samples."""
    cause = "on the number of calls, on a random generator shared by the samples, or on its rank" if alone else PROCESS
    return (
        f"sample {sample} differs between rank {rank} and one process: the dataset depends {cause}. A sample must "
        "depend on its index alone. The mesh is not to blame."
    )


def counted(call: int) -> Cause:
    """Why a model gives another output in this forward."""
    return "calls", (
        "called again with the same input, weights, saved buffers and random numbers, the model gives another output "
        f"in its forward {call}: it counts its calls, or keeps other state that is not in the checkpoint, in a plain "
        "attribute or a buffer that is not saved. Another microbatch or a restart changes that. Keep it in a saved "
        "buffer."
    )


def unstable(runs: Runs, difference: str, compute: str) -> Cause:
    """Why two runs of one process differ."""
    from dtrain.evaluation import parity

    one, again = runs.where("one"), runs.where("again")
    sentence = f"two runs of one process differ from each other, {difference}:"
    if parity.random_data(one):
        cause = "the samples of the dataset are not deterministic. The mesh is not to blame."
        return "deterministic", f"{sentence} {cause}"
    if other := parity.other_sample(again, one):
        return "data", f"{sentence} sample {other[0]} of the dataset depends {PROCESS}. The mesh is not to blame."
    if verify_runs.FRESH:
        runs.same()
        if parity.first_difference(parity.compare(runs.where("same"), one, compute)) is None:
            cause = "depends on hash() of text or the order of a set, which differ between interpreters"
            return "hash", f"{sentence} the model (or its loss) {cause}. Sort the set. The mesh is not to blame."
    cause = "the model (or its loss, or the data) is not deterministic. The mesh is not to blame."
    return "deterministic", f"{sentence} {cause}{runs.order()}"


def kinds(runs: Runs, drawn: Sequence[str], compute: str) -> Iterator[Cause]:
    """(kind, sentence) for each cause of a difference from one process, as further runs show it."""
    from dtrain.evaluation import parity

    asked, one = runs.where("asked"), runs.where("one")
    other = parity.other_sample(asked, one)
    if other:
        yield "data", _of_sample(*other, alone=True)
        return
    lost = False
    if runs.stop:
        runs.asked("straight", stops=False)
        lost, asked = runs.differ(asked, runs.where("straight"), compute), runs.where("straight")
    if not lost or runs.differ(asked, one, compute):
        yield _split(runs, asked, drawn, compute)
    if lost:
        sentence = (
            f"stopped after step {runs.stop} and resumed, the run gives other numbers than without the stop: the "
            "model, the objective or the data keeps state that is not in the checkpoint, such as a plain attribute "
            "or its own random generator."
        )
        yield "resume", sentence


def _split(runs: Runs, asked: str, drawn: Sequence[str], compute: str) -> Cause:
    """Why a run without a stop differs from one process."""
    if drawn:
        return "random", (
            f"the forward draws random numbers (dropout, of {', '.join(drawn)}): every sample gets different ones on "
            "another mesh. Set dropout to 0 to compare the rest."
        )
    if runs.micro == runs.whole:
        return "mesh", f"one process sees as many samples in a forward: {SPLIT}"
    runs.split()
    small = f"one process with microbatch={runs.micro}"
    if not runs.differ(asked, runs.where("split"), compute, weights=False):
        return "microbatch", (
            f"{small} gives the numbers of the requested run: they depend on which samples share a forward, as with "
            "batch norm, a mean over a microbatch, or a forward that mixes the samples of its batch. The mesh is not "
            "to blame."
        )
    if not runs.differ(runs.where("split"), runs.where("one"), compute, weights=False):
        return "mesh", f"{small} gives the numbers of {runs.whole} at once: {SPLIT}"
    both = "the numbers depend on which samples share a forward, and on the mesh"
    return "both", f"{small} agrees with neither: {both}."
