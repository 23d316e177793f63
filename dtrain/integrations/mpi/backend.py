"""Collectives of MPI, on the CPU: Open MPI, MPICH or Intel MPI, by mpi4py.

    mpirun -np 4 python -m dtrain backend=mpi strategy=fsdp out=/shared/run

Each rank is a process that mpirun or mpiexec has started; MPI would take a forked one for a run of one rank.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from dtrain.backend import process_group
from dtrain.errors import PreflightError
from dtrain.integrations.mpi.loop import Loop

LIBRARIES: Mapping[str, str] = {
    "OMPI_COMM_WORLD_RANK": "libmpi.so:libmpi.so.40:libmpi.so.80",
    "PMI_RANK": "libmpi.so.12:libmpich.so.12",
}
"""Variable of a launcher -> where its library may be. With both installed, mpi4py would load either."""


@dataclass(frozen=True)
class Mpi:
    """`timeout`: seconds of every collective."""

    timeout: float

    @contextmanager
    def open(self) -> Iterator[None]:
        libraries = next((names for name, names in LIBRARIES.items() if name in os.environ), None)
        if libraries:
            os.environ.setdefault("MPI4PY_LIBMPI", libraries)
        loop = _loop()
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if (loop.rank, loop.size) != (rank, world):
            raise PreflightError(
                f"backend=mpi: this is rank {rank} of {world}, but {loop.library} says rank {loop.rank} of "
                f"{loop.size}: it is not the library of the launcher. Set MPI4PY_LIBMPI=<path of its libmpi.so>."
            )
        from dtrain.integrations.mpi.group import NAME, register

        register()
        with process_group(NAME, timeout=self.timeout):
            yield


def _loop() -> Loop:
    """The loop of this process. Raises PreflightError."""
    try:
        return Loop.of_process()
    except ModuleNotFoundError as error:
        raise PreflightError("backend=mpi: mpi4py is not here. Type pip install 'dtrain[mpi]'.") from error
    except (ImportError, RuntimeError) as error:
        raise PreflightError(
            f"backend=mpi: mpi4py has no library of MPI: {str(error).splitlines()[0]}. Set LD_LIBRARY_PATH to its "
            "folder. Debian's MPICH names it libmpich.so.12: make a link to it that is named libmpi.so.12."
        ) from error
