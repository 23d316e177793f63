"""What `dtrain plan best` picks beside twelve measured layouts of two ranks on two cores, for RESULTS.md, after
`python -m dtrain doctor`.

    python tests/bench/best.py [--rounds 3] [--first 0]

Steps as `train` takes them, all layouts in turn in each round; the lowest quarter counts, so let nothing else run.
"""

import argparse
import tempfile
from collections.abc import Sequence

from dtrain.build import build
from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.doctor.machine import STEPS
from dtrain.doctor.ranks import measuring
from dtrain.launcher import zygote
from dtrain.planned import Plan
from dtrain.predict.prediction import predict
from dtrain.resolve import best, resolve
from dtrain.resolve.auto import spelled
from dtrain.tracing import shapes_of

RUNS = tuple(
    f"model=gpt data=synthetic batch={batch} data.sequence={sequence} model.width={width} model.layers={layers}"
    for width, layers, sequence, batch in (
        (64, 2, 64, 8),
        (64, 4, 128, 16),
        (128, 4, 64, 8),
        (128, 4, 128, 16),
        (128, 8, 256, 8),
        (256, 4, 64, 4),
        (512, 2, 16, 2),
        (512, 4, 32, 2),
        (768, 2, 16, 4),
        (1024, 2, 32, 2),
    )
)
"""From runs that compute to runs that mostly exchange gradients."""
PARTS = {
    "few": ("ddp", "ddp remat=full", "zero1", "zero2", "fsdp", "fsdp remat=full", "ddp mesh.tp=2", "ddp mesh.cp=2",
            "ddp mesh.tp=2 tensor.sequence=split tensor.loss=split"),
    "many": ("ddp microbatch=2", "fsdp microbatch=2", "ddp mesh.pp=2 microbatch=2"),
    "no more": ("ddp mesh.tp=2 remat=full", "ddp mesh.pp=2 microbatch=1", "ddp mesh.tp=2 microbatch=1"),
}  # fmt: skip
"""Layouts of every run, of those that have many samples, and of those that have not."""


def main(rounds: int, first: int) -> None:
    here, good = detect(), 0
    assert here.figures, here.unmeasured
    with tempfile.TemporaryDirectory() as folder, zygote.kept():
        zygote.begin()
        quiet = ("devices=2", "steps=1000", "logger=[]", f"out={folder}/run")
        for words in RUNS[first:]:
            config = compose([*words.split(), *quiet])
            pick = best(config, here, shapes_of, 1).layouts[0]
            layouts = [f"strategy={part}" for part in PARTS["few"] + PARTS["many" if config.batch > 4 else "no more"]]
            plans = {layout: resolve(compose([*words.split(), *quiet, *layout.split()]), here) for layout in layouts}
            mine = next((layout for layout, plan in plans.items() if alike(plan, pick.plan)), spelled(pick.words))
            plans.setdefault(mine, resolve(compose([*words.split(), *quiet, *spelled(pick.words).split()]), here))
            seconds = measured(plans, rounds)
            fastest = min(seconds, key=lambda layout: seconds[layout])
            good += seconds[mine] <= 1.05 * seconds[fastest]
            ratio = seconds[mine] / seconds[fastest]
            print(f"\n{words}\npicked {mine}: {1e3 * seconds[mine]:.1f} ms, {ratio:.3f} of {fastest}", flush=True)
            for layout in sorted(seconds, key=lambda layout: seconds[layout]):
                time = predict(plans[layout], shapes_of(plans[layout])).time
                assert time
                print(f"  {1e3 * seconds[layout]:8.1f} {1e3 * time.seconds:8.1f}  {layout}")
    print(f"\n{good} of {len(RUNS[first:])} fastest or within 5% of it")


def alike(one: Plan, other: Plan) -> bool:
    """Whether two plans are the same layout."""
    return all(getattr(one, name) == getattr(other, name) for name in ("strategy", "mesh", "batch", "remat", "tensor"))


def measured(plans: dict[str, Plan], rounds: int) -> dict[str, float]:
    """Seconds of a step of each plan, the slowest rank's."""
    taken: dict[str, list[float]] = {layout: [] for layout in plans}
    for _ in range(rounds):
        for layout, plan in plans.items():
            taken[layout].append(build(plan.launcher).launch(measuring(plan, STEPS)).metrics["seconds"])
    return {layout: quarter(every) for layout, every in taken.items()}


def quarter(taken: Sequence[float]) -> float:
    return sorted(taken)[len(taken) // 4]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="number of the run to begin with")
    main(**vars(parser.parse_args()))
