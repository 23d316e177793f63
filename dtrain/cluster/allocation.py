"""Ranks that another launcher started. The variables of srun and mpirun are translated to those of torchrun, which
torch and dtrain read.
"""

import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dtrain.cluster.network import PORTS
from dtrain.errors import PreflightError

NUMBER = re.compile(r"[0-9]{1,9}")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
SET_OR_UNSET = "Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun does, or unset them all"


@dataclass(frozen=True)
class External:
    """This process is one of `world` ranks (`local_world` on this host) started by torchrun, or by any launcher that
    sets RANK and WORLD_SIZE. `one_store`: all attempts share a rendezvous store.
    """

    rank: int
    world: int
    local_world: int
    one_store: bool = False


@dataclass(frozen=True)
class Starter:
    """Names of the variables by which a launcher gives a process its rank; `job` identifies the job."""

    rank: str
    world: str
    local_rank: str
    local_world: str
    job: str = ""
    hosts: str = ""

    def missing(self, environ: Mapping[str, str]) -> list[str]:
        """Variables that are needed to know the rank, but are not set."""
        return [name for name in (self.rank, self.world, self.local_rank, self.local_world) if not environ.get(name)]


STARTERS = (
    Starter(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    Starter("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    Starter(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_JOB_ID",
        "SLURM_STEP_NODELIST",
    ),
)
"""The order matters: inside a Slurm allocation, mpirun starts its daemons by srun. The batch script itself is not a
step, so not a rank.
"""


def adopt(environ: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE and, if known, the host of rank 0, for processes that mpirun or srun started."""
    starter = next((one for one in STARTERS if not one.missing(environ)), None)
    if {"RANK", "WORLD_SIZE"} & environ.keys() or starter is None or environ[starter.world] == "1":
        return
    # Slurm lists the ranks of each node: 4(x2),3
    counts = re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", environ[starter.local_world])
    each = [count for count, times in counts for _ in range(int(times or 1))]
    node = environ.get("SLURM_NODEID", "0") if starter.hosts else "0"
    known = NUMBER.fullmatch(node) and int(node) < len(each)
    mine = each[int(node)] if known else environ[starter.local_world]  # which `external` then refuses
    environ.update(
        RANK=environ[starter.rank],
        WORLD_SIZE=environ[starter.world],
        LOCAL_RANK=environ[starter.local_rank],
        LOCAL_WORLD_SIZE=mine,
    )
    host = "127.0.0.1" if mine == environ["WORLD_SIZE"] else _first(environ.get(starter.hosts, ""))
    if host:
        environ.setdefault("MASTER_ADDR", host)
        environ.setdefault("MASTER_PORT", str(PORTS[zlib.crc32(environ.get(starter.job, "").encode()) % len(PORTS)]))


def _refuse_missing_rank(environ: Mapping[str, str]) -> None:
    """Raises PreflightError if the launcher started several processes without giving them ranks: each would train a run
    of its own.
    """
    starter = next(
        (one for one in STARTERS if environ.get(one.rank) and environ.get(one.world, "") not in ("", "1")), None
    )
    if starter and all(one.missing(environ) for one in STARTERS):
        missing = " nor ".join(starter.missing(environ))
        raise PreflightError(
            f"{starter.world}={environ[starter.world]} says that this is one of several ranks, but its launcher set no "
            f"{missing}. {SET_OR_UNSET}."
        )


def _first(hosts: str) -> str:
    """The first host of a Slurm host list, such as gpu03-ib of gpu[03-05,9]-ib,b."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.match(r"([^,[]|\[[^]]*\])*", hosts)[0])  # type: ignore[index]


def external(environ: Mapping[str, str]) -> External | None:
    """The rank in the environment; None for a single process. Raises PreflightError if the variables contradict."""
    rank, world = environ.get("RANK"), environ.get("WORLD_SIZE")
    if (rank is None and world in (None, "1")) or (world is None and rank == "0"):
        _refuse_missing_rank(environ)
        return None
    local = environ.get("LOCAL_WORLD_SIZE", world)
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
    values |= {name: environ[name] for name in ("LOCAL_RANK", "GROUP_RANK") if name in environ}
    if problem := _contradiction(values):
        raise PreflightError(f"the environment has RANK or WORLD_SIZE, but {problem}. {SET_OR_UNSET}.")
    if int(world or 0) > 1 and (problem := _no_address(environ)):
        raise PreflightError(
            f"the environment has RANK or WORLD_SIZE, but {problem}, so the {world} ranks cannot meet. Set both to the "
            "host of rank 0 and a free port there (mpirun -x MASTER_ADDR=<host>)."
        )
    one_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return External(int(rank or 0), int(world or 0), int(local or 0), one_store)


def _contradiction(values: Mapping[str, str | None]) -> str:
    """The first problem of the numbers of ranks; empty if there is none."""
    for name, value in values.items():
        if not value:
            return f"{name} is not set"
        if not NUMBER.fullmatch(value):
            return f"{name}={value} is not a number"
    rank, world, local, local_rank = (int(values.get(name) or 0) for name in RANKS)
    if rank >= world:
        return f"RANK={values['RANK']} is not one of WORLD_SIZE={values['WORLD_SIZE']} ranks, which count from 0"
    of_node = f"LOCAL_WORLD_SIZE={values['LOCAL_WORLD_SIZE']}"
    if not local or world % local:
        return f"WORLD_SIZE={values['WORLD_SIZE']} is not a multiple of {of_node}, the ranks of each node"
    if local_rank >= local:
        return f"LOCAL_RANK={values['LOCAL_RANK']} is not one of {of_node} ranks of a node, which count from 0"
    return ""


def _no_address(environ: Mapping[str, str]) -> str:
    """The problem of the address of rank 0; empty if there is none."""
    port = environ.get("MASTER_PORT", "")
    if not environ.get("MASTER_ADDR"):
        return "MASTER_ADDR is not set"
    if not port:
        return "MASTER_PORT is not set"
    return "" if NUMBER.fullmatch(port) and 0 < int(port) < 1 << 16 else f"MASTER_PORT={port} is not a port"
