"""From typing a command to the first step of 2 nodes x 2 ranks: dtrain's launchers beside each engine's own way.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python tests/bench/engines.py [--rounds 5] [--engines slurm ssh mpi ray spark]

The engines are daemons of this host, which run before the clock does. Both train a small model by DDP and gloo; dtrain
does with its defaults, and the other is a script without anything else. They are run in turn.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray_cluster
import ssh
import standalone
from slurm import slurm

from dtrain.config.word import quote

BARE = '''"""Ranks that their launcher has started take a step."""

import os
import sys
import time


def step(path):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    names = {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"}
    for name, other in names.items():
        os.environ.setdefault(name, os.environ.get(other, ""))
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        open(path, "w").write(str(time.time()))
    dist.barrier()


if __name__ == "__main__":
    step(sys.argv[1])
'''
TRAINER = """import sys

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

exec(open("bare.py").read().partition("if __name__")[0])  # a function of __main__ travels by value
ray.init(address=sys.argv[2], log_to_driver=False)
TorchTrainer(step, train_loop_config=sys.argv[1], scaling_config=ScalingConfig(num_workers=4)).fit()
"""
DISTRIBUTOR = """import sys

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

exec(open("bare.py").read().partition("if __name__")[0])
builder = SparkSession.builder.master(sys.argv[2])
for pair in sys.argv[3:]:
    builder = builder.config(*pair.split("=", 1))
builder.getOrCreate()
TorchDistributor(num_processes=4, local_mode=False, use_gpu=False).run(step, sys.argv[1])
"""
FIRST = """import os
import time


class First:
    about = {"figures": {}}
    every = 1

    def __init__(self, *, path):
        self.path = path

    def __call__(self, info):
        if info.step == 1 and os.environ["RANK"] == "0":
            open(self.path, "w").write(str(time.time()))
"""
WORDS = [
    "model=mlp", "data=synthetic", "objective=regression", "strategy=ddp", "nodes=2", "devices=2", "batch=8", "steps=1",
    "hook.first._target_=first.First", "trust=[first]",
]  # fmt: skip


def seconds(command: list[str], place: Path, environment: dict[str, str], name: str) -> float:
    """From starting a command to its first step."""
    path = place / name
    words = [word.replace("{path}", str(path)) for word in command]
    began = time.time()
    with (place / f"{name}.log").open("w") as log:
        code = subprocess.run(words, cwd=place, env=environment, stdout=log, stderr=log, timeout=300).returncode
    if code or not path.exists():
        sys.exit((place / f"{name}.log").read_text()[-4000:])
    return float(path.read_text()) - began


def dtrain(*words: str) -> Callable[[str], list[str]]:
    return lambda name: [
        sys.executable, "-m", "dtrain", *WORDS, "+hook.first.path={path}", f"out=out-{name}", *words
    ]  # fmt: skip


def own(*command: str) -> Callable[[str], list[str]]:
    return lambda name: [*command]


TORCHRUN = (
    "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29555 --rdzv-id $SLURM_JOB_ID "
    "--local-addr 127.0.0.1 bare.py {path}"
)


@contextmanager
def of_slurm(folder: Path) -> Iterator[tuple[dict[str, str], dict[str, Callable[[str], list[str]]]]]:
    with slurm(folder) as variables:
        environment = {**os.environ, **variables, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        batch = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--output=/dev/null"]
        yield (
            environment,
            {
                "launcher=slurm": dtrain("launcher=slurm"),
                "sbatch, srun, torchrun": own(*batch, "--wrap", f"srun {TORCHRUN}"),
            },
        )


@contextmanager
def of_ssh(folder: Path) -> Iterator[tuple[dict[str, str], dict[str, Callable[[str], list[str]]]]]:
    with ssh.hosts(folder) as (names, options):
        typed = shlex.join(options)
        torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1"
        lines = [
            f"ssh {typed} -p {name.partition(':')[2]} 127.0.0.1 'cd {folder.parent}/place && OMP_NUM_THREADS=1 {torchrun} "
            f"--master-port 29557 --node-rank {node} bare.py '$0 &"
            for node, name in enumerate(names)
        ]
        yield (
            {**os.environ},
            {
                "launcher=ssh": dtrain(
                    "launcher=ssh", f"launcher.hosts=[{','.join(names)}]", f"launcher.options={quote(typed)}",
                    f"launcher.python={sys.executable}", "launcher.address=127.0.0.1",
                ),
                "ssh, torchrun": own("bash", "-c", " ".join([*lines, "wait"]), "{path}"),
            },
        )  # fmt: skip


@contextmanager
def of_mpi(folder: Path) -> Iterator[tuple[dict[str, str], dict[str, Callable[[str], list[str]]]]]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **root, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556"}
    command = "mpirun.openmpi --host localhost:2"
    mpirun = ["mpirun.openmpi", "--host", "localhost:4", "-np", "4", "--bind-to", "none", sys.executable, "bare.py"]
    yield (
        environment,
        {
            "launcher=mpi": dtrain("launcher=mpi", f"launcher.command='{command}'", "launcher.address=127.0.0.1"),
            "mpirun": own(*mpirun, "{path}"),
        },
    )


@contextmanager
def of_ray(folder: Path) -> Iterator[tuple[dict[str, str], dict[str, Callable[[str], list[str]]]]]:
    with ray_cluster.running() as cluster:
        yield (
            {**os.environ, "PYTHONPATH": ray_cluster.PATH},
            {
                "launcher=ray": dtrain("launcher=ray", f"launcher.cluster={cluster.address}"),
                "TorchTrainer": own(sys.executable, "trainer.py", "{path}", cluster.address),
            },
        )


@contextmanager
def of_spark(folder: Path) -> Iterator[tuple[dict[str, str], dict[str, Callable[[str], list[str]]]]]:
    with standalone.spark(folder) as (master, variables):
        conf = [f"{name}={value}" for name, value in standalone.SMALL.items()]
        yield (
            {**os.environ, **variables},
            {
                "launcher=spark": dtrain(
                    "launcher=spark", f"launcher.master={master}", f"launcher.conf={standalone.CONF}"
                ),
                "TorchDistributor": own(sys.executable, "distributor.py", "{path}", master, *conf),
            },
        )


ENGINES = {"slurm": of_slurm, "ssh": of_ssh, "mpi": of_mpi, "ray": of_ray, "spark": of_spark}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="*", default=[*ENGINES], choices=ENGINES)
    asked = parser.parse_args()
    for engine in asked.engines:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "place")
            place.mkdir()
            for name, text in {"bare": BARE, "trainer": TRAINER, "distributor": DISTRIBUTOR, "first": FIRST}.items():
                (place / f"{name}.py").write_text(text)
            daemons = Path(folder, engine)
            daemons.mkdir()
            with ENGINES[engine](daemons) as (environment, ways):
                taken: dict[str, list[float]] = {}
                for number in range(asked.rounds):
                    for way, (title, command) in enumerate(ways.items()):
                        name = f"{number}-{way}"
                        taken.setdefault(title, []).append(seconds(command(name), place, environment, name))
                        print(f"{title}: {taken[title][-1]:.2f} s", flush=True)
            ours, theirs = (statistics.median(each) for each in taken.values())
            print(f"{engine}: {ours:.2f} s beside {theirs:.2f} s, ratio {ours / theirs:.2f}", flush=True)


if __name__ == "__main__":
    main()
