"""Ranks that somebody else started. What srun and mpirun say of them is told again in torchrun's variables, which torch and all of dtrain read."""

import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dtrain.errors import PreflightError

PORTS = range(20000, 32000)
"""Below those that a system hands out by itself."""


@dataclass(frozen=True)
class External:
    """This process is one of `world` ranks, `local_world` on this host, that torchrun (or any launcher that sets RANK and WORLD_SIZE) started.

    `one_store`: all its attempts share a rendezvous store.
    """

    rank: int
    world: int
    local_world: int
    one_store: bool = False


@dataclass(frozen=True)
class Starter:
    """The names of the variables by which a launcher tells a process its place; `job` tells its jobs apart."""

    rank: str
    world: str
    local_rank: str
    local_world: str
    job: str = ""
    hosts: str = ""


STARTERS = (
    Starter("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
    Starter("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    Starter("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"),
)
"""In this order: within an allocation of Slurm mpirun starts its own helpers by srun. A batch script itself is no step, and no rank."""


def adopt(environ: MutableMapping[str, str]) -> None:
    """Where several processes were started without RANK and WORLD_SIZE, as mpirun and srun do: set these, and where rank 0 is if that is known."""
    said = {"RANK", "WORLD_SIZE"} & environ.keys()
    starter = next((one for one in STARTERS if all(environ.get(name) for name in (one.rank, one.world, one.local_rank, one.local_world))), None)
    if said or starter is None or environ[starter.world] == "1":
        return
    # Slurm tells the number of each node: 4(x2),3
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ[starter.local_world])
    each = [int(count) for count, times in counts for _ in range(int(times or 1))]
    mine = each[int(environ.get("SLURM_NODEID", 0)) if starter.hosts else 0]
    environ.update(RANK=environ[starter.rank], WORLD_SIZE=environ[starter.world], LOCAL_RANK=environ[starter.local_rank], LOCAL_WORLD_SIZE=str(mine))
    host = "127.0.0.1" if str(mine) == environ["WORLD_SIZE"] else _first(environ.get(starter.hosts, ""))
    if host:
        environ.setdefault("MASTER_ADDR", host)
        environ.setdefault("MASTER_PORT", str(PORTS[zlib.crc32(environ.get(starter.job, "").encode()) % len(PORTS)]))


def _first(hosts: str) -> str:
    """The first of Slurm's list of hosts: of gpu[03-05,9]-ib,b it is gpu03-ib."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.match(r"([^,[]|\[[^]]*\])*", hosts)[0])  # type: ignore[index] # it matches nothing, too


def external(environ: Mapping[str, str]) -> External | None:
    """The place among other ranks that the environment tells; None for a process of its own. Raises PreflightError for what can be no such place."""
    rank, world = environ.get("RANK"), environ.get("WORLD_SIZE")
    if (rank is None and world in (None, "1")) or (world is None and rank == "0"):
        return None
    local = environ.get("LOCAL_WORLD_SIZE", world)
    said = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
    numbers = {name: int(value) for name, value in said.items() if value and re.fullmatch(r"\d{1,9}", value)}
    problem = next((f"{name}={value} is no number" if value else f"{name} is not set" for name, value in said.items() if name not in numbers), "")
    if not problem and not 0 <= numbers["RANK"] < numbers["WORLD_SIZE"]:
        problem = f"RANK={rank} is none of WORLD_SIZE={world} ranks, which count from 0"
    if not problem and (not numbers["LOCAL_WORLD_SIZE"] or numbers["WORLD_SIZE"] % numbers["LOCAL_WORLD_SIZE"]):
        problem = f"WORLD_SIZE={world} ranks are not the same number, LOCAL_WORLD_SIZE={local}, on each node"
    port = environ.get("MASTER_PORT", "")
    if not problem and numbers["WORLD_SIZE"] > 1 and not (environ.get("MASTER_ADDR") and port.isdigit() and 0 < int(port) < 1 << 16):
        where = "MASTER_ADDR is not set" if not environ.get("MASTER_ADDR") else f"MASTER_PORT={port} is no port" if port else "MASTER_PORT is not set"
        problem = f"{where}, so the {world} ranks cannot meet. Set both to the host of rank 0 and a free port there (mpirun -x MASTER_ADDR=<host>)"
    if problem:
        unset = "" if "Set both" in problem else ". Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun does, or unset them all"
        raise PreflightError(f"the environment has RANK or WORLD_SIZE, but {problem}{unset}.")
    return External(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_WORLD_SIZE"], environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
