"""The place of this process among those that another launcher started, by the table of environments."""

import hashlib
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from dtrain.cluster.environments import TABLE, Kind, Row
from dtrain.errors import EnvironError

NUMBER = re.compile(r"[0-9]{1,9}")
PORT = 29500
"""Where the nodes of a platform that gives an address without a port meet."""
SET_OR_UNSET = "Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun does, or unset them all"
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of ranks that a process which is no rank removes."""


@dataclass(frozen=True)
class External:
    """This process is one of `world` ranks (`local_world` on each node; 0: not known), or the process of one of `world`
    nodes (0: as many as the word `nodes` says). `one_store`: all attempts share torchrun's rendezvous store.
    """

    rank: int
    world: int
    local_world: int
    one_store: bool = False
    kind: Kind = "ranks"
    local_rank: int | None = field(default=None, compare=False)
    address: str = field(default="", compare=False)
    """Of the first rank or node; empty if they meet by a file under `out`."""
    port: int = field(default=0, compare=False)
    job: str = field(default="", compare=False)
    """Identifies this start of the job, as far as the launcher does; empty if it does not."""
    devices: int | None = field(default=None, compare=False)
    """Ranks per node that a launcher of nodes asks for."""
    least: int = field(default=0, compare=False)
    """The fewest nodes with which the run may go on; 0: all."""
    row: Row = field(default=TABLE[0], compare=False)

    @property
    def variables(self) -> str:
        return " and ".join(filter(None, (self.row.rank, self.row.world)))

    @property
    def nodes(self) -> int:
        return self.world // (self.local_world or self.world or 1) if self.kind == "ranks" else self.world


def external(environ: Mapping[str, str]) -> External | None:
    """The place that the environment gives this process; None if it is a single one. Raises EnvironError if the
    variables contradict each other.
    """
    place = read(environ)
    return place if place and (place.world != 1 or (place.kind == "ranks" and place.row.rank == "RANK")) else None


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process reports what all ranks find alike: each node has an output of its own, ranks share one."""
    try:
        place = read(environ)
    except EnvironError:
        return True
    return not place or place.kind == "nodes" or place.rank == 0


def adopt(environ: MutableMapping[str, str], place: External, *, local_world: int) -> None:
    """Set the variables of a rank as torchrun does, which torch and dtrain read."""
    local = place.rank % local_world if place.local_rank is None else place.local_rank
    environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world))
    environ.update(LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(local_world))


def read(environ: Mapping[str, str]) -> External | None:
    """As `external`, also of a single process that a launcher of several started."""
    places, incomplete, used = list[External](), list[str](), set[str]()
    for row in TABLE:
        if not row.applies(environ) or row.rank in used:
            continue
        values = {**environ, **row.parse(environ)}
        if not {row.rank, row.world} & values.keys() or _is_left_over(row, values):
            continue
        used.add(row.rank)
        problem = next(_incomplete(row, values), "")
        if problem:
            incomplete.append(problem)
        else:
            places.append(_place(row, values))
    places.sort(key=lambda place: (place.kind == "nodes", place.row.alone and not environ.get(place.row.local_world)))
    if not places and incomplete:
        raise EnvironError(f"{incomplete[0]}. {SET_OR_UNSET}.")
    for other in places[1:]:
        if other.row.world and (problem := _conflict(places[0], other, environ)):
            raise EnvironError(problem)
    return places[0] if places else None


def _is_left_over(row: Row, values: Mapping[str, str]) -> bool:
    """Whether one of RANK and WORLD_SIZE is set, and means a single process."""
    return row.rank == "RANK" and (values.get("RANK"), values.get("WORLD_SIZE")) in ((None, "1"), ("0", None))


def _incomplete(row: Row, values: Mapping[str, str]) -> Iterator[str]:
    """Why the variables of a row give no place, though some are set."""
    rank, world = values.get(row.rank), values.get(row.world)
    if not rank and row.world:
        yield f"the environment has {row.world}, but {row.rank} is not set"
    elif not world and row.world:
        yield f"the environment has {row.rank}, but {row.world} is not set"
    elif row.local_world and not row.alone and world != "1":
        missing = " nor ".join(name for name in (row.local_rank, row.local_world) if not values.get(name))
        if missing:
            yield f"{row.world}={world} says that this is one of several ranks, but its launcher set no {missing}"


def _place(row: Row, values: Mapping[str, str]) -> External:
    """The place of a row whose variables are set. Raises EnvironError if they contradict each other."""
    numbers = dict[str, int]()
    for name in (row.rank, row.world, row.local_rank, row.local_world, row.node, row.nodes, row.least, row.devices):
        if name and name in values and not (name == row.devices and not values[name]):
            if not NUMBER.fullmatch(values[name]):
                wrong = "a number" if values[name] else "set"
                raise EnvironError(f"{_shown(name, values)} is not {wrong}. {SET_OR_UNSET}.")
            numbers[name] = int(values[name])
    rank, world = numbers[row.rank], numbers.get(row.world, 0)
    if row.world and rank >= world:
        what = "ranks" if row.kind == "ranks" else "nodes"
        raise EnvironError(
            f"{_shown(row.rank, values)} is not one of {_shown(row.world, values)} {what}, which count from 0. "
            f"{SET_OR_UNSET}."
        )
    local, local_rank = _local(row, numbers, values) if row.kind == "ranks" else 0, numbers.get(row.local_rank)
    address, port = _address(row, values, needed=world != 1)
    job = [f"{name}={values[name]}" for name in row.job if values.get(name)]
    return External(
        rank, world, local, values.get("TORCHELASTIC_USE_AGENT_STORE") == "True", row.kind,
        local_rank=local_rank, address=address, port=port, devices=numbers.get(row.devices), row=row,
        job=hashlib.sha256(" ".join(job).encode()).hexdigest()[:16] if job else "", least=numbers.get(row.least, 0),
    )  # fmt: skip


def _local(row: Row, numbers: Mapping[str, int], values: Mapping[str, str]) -> int:
    """The ranks of each node; 0 if the first node of a launcher does not know."""
    rank, world, node = numbers[row.rank], numbers[row.world], numbers.get(row.node, 0)
    local_rank, local = numbers.get(row.local_rank, 0), numbers.get(row.local_world, world)
    ranks = next((_shown(name, values) for name in (row.local_world, row.node, row.world) if name in numbers), "")
    if not row.local_world and row.local_rank not in numbers:
        return 0
    if not row.local_world:  # as many as are before this node, on each of those
        local = (rank - local_rank) // node if node and not (rank - local_rank) % node else 0
        if (node and (local <= local_rank or world % local)) or (local_rank != rank and not node):
            raise EnvironError(
                f"{_shown(row.rank, values)} and {_shown(row.local_rank, values)} of {_shown(row.world, values)} "
                f"contradict {ranks}: nodes have the same number of ranks. {SET_OR_UNSET}."
            )
        return local
    if not local or world % local:
        raise EnvironError(
            f"{_shown(row.world, values)} is not a multiple of {ranks}, the ranks of each node. Give each node the "
            "same number."
        )
    if local_rank >= local:
        raise EnvironError(
            f"{_shown(row.local_rank, values)} is not one of {ranks} ranks of a node, which count from 0. "
            f"{SET_OR_UNSET}."
        )
    nodes = numbers.get(row.nodes, world // local)
    if nodes * local != world:
        raise EnvironError(
            f"{_shown(row.world, values)} is not {_shown(row.nodes, values)} x {ranks}, the nodes and the ranks of "
            "each. Give each node the same number."
        )
    return local


def _address(row: Row, values: Mapping[str, str], *, needed: bool) -> tuple[str, int]:
    """Where the first rank or node is met, if the environment says so."""
    names = [row.address, row.port] if values.get(row.address) else ["MASTER_ADDR", "MASTER_PORT"]
    host, port = (values.get(name, "") for name in names)
    if not host or not needed:
        return "", 0
    if row.kind == "nodes" and not port:
        return host, PORT
    if not port:
        raise EnvironError(f"the environment has MASTER_ADDR={host[:80]}, but MASTER_PORT is not set. {SET_OR_UNSET}.")
    if not NUMBER.fullmatch(port) or not 0 < int(port) < 1 << 16:
        raise EnvironError(f"{names[1]}={port[:40]} is not a port. {SET_OR_UNSET}.")
    return host, int(port)


def _conflict(inner: External, outer: External, environ: Mapping[str, str]) -> str:
    """Why two environments that are both set cannot be those of one run; empty if they agree, or `outer` started the
    launcher of `inner` once on each node.
    """
    restarted = environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # with fewer nodes, perhaps
    elastic = inner.row.name == "torchrun"
    if (outer.world == 1 and outer.row.rank != "RANK") or (elastic and (restarted or inner.nodes > 1)):
        return ""
    same = {inner.world, inner.world * (inner.devices or 1)} if inner.kind == "nodes" else {inner.world}
    if outer.world in same and not elastic:
        if inner.rank == outer.rank:
            return ""
        names = inner.row.rank, outer.row.rank
    elif inner.kind == "ranks" and outer.row.rank != "RANK" and outer.world <= inner.nodes:
        return ""
    else:
        names = inner.row.world, outer.row.world
    first, second = (_shown(name, environ) for name in names)
    return (
        f"{first} ({inner.row.name}) and {second} ({outer.row.name}) disagree: each says another place of this "
        "process. Start it by one of them alone, or unset the variables of the other."
    )


def _shown(name: str, values: Mapping[str, str]) -> str:
    return f"{name}={values[name][:80]}" if values.get(name) else name
