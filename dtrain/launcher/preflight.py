"""Checks before ranks start: data that exists, storage that can be written, packages that are installed."""

import contextlib
import importlib.util
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from dtrain import secrets
from dtrain.build import build
from dtrain.cluster import detect, network
from dtrain.config.facts import about, fact
from dtrain.config.word import cut
from dtrain.errors import PreflightError, StoreError, why
from dtrain.launcher import teacher, trackers
from dtrain.launcher.run import described, trained_on
from dtrain.planned import Part, Plan
from dtrain.secrets import screen
from dtrain.storage import attempts, hub, store
from dtrain.storage.attempts import Attempt
from dtrain.weights import names, plain
from dtrain.weights.owner import key_of, no_base, other_weights, resized
from dtrain.weights.place import is_ours, open_at

FEWEST_FILES, TASKS = 32, 16
"""Open files of a single rank, and its threads beside those that compute."""
IMAGES = ("images", "webdataset")
LOOKED_AT = 1 << 24
"""Tokens of a file that are checked before the launch: ranks check those they train on."""
PADDED = 128
"""The vocabulary of a model may be padded to a multiple of it."""
LONGEST = 400
"""The most letters of a path in a message."""


def check(plan: Plan, *, of_sweep: bool = False) -> None:
    """`of_sweep`: `out` is the folder of a sweep. Raises PreflightError with all problems."""
    key, file, kind = ("sweep.out", "config.yaml", "run") if of_sweep else ("out", "sweep.yaml", "sweep")

    def problem(url: str) -> str | None:
        if store.exists(store.join(url, file)):
            return f"holds a {kind}, and a folder is that of a run or of a sweep. Type {key}=<another place>."
        if store.exists(store.join(url, attempts.IMPORTED)):
            typed = f"{screen.typed(f'init={url}')} {key}=<another place>"
            return f"holds weights that were imported. Type {typed} to start from them."
        store.probe(url)
        return None

    problems = missing(plan) or [*_stored(key, plan.out, problem)]
    if problems:
        raise PreflightError(*problems)


def missing(plan: Plan) -> list[str]:
    """One sentence for each problem; nothing is written."""
    checks = OF_RUN if fact(plan.launcher, "where") == "elsewhere" else (*OF_NODE, *OF_RUN)
    return [problem for each in checks for problem in each(plan)]


def begins(plan: Plan) -> list[str]:
    """The same for the checkpoint that a run begins with, if that is on this machine."""
    return [*_source(plan)] if store.is_local(plan.fork or plan.init or "") and store.is_local(plan.out) else []


def on_node(plan: Plan) -> list[str]:
    """The same for a node that has joined a run of another host."""
    return [problem for each in (_devices, *OF_NODE) if each not in ALONE for problem in each(plan)]


def _machine(plan: Plan) -> Iterable[str]:
    """A plan for another machine can be printed, not run."""
    if plan.cluster and "cluster" not in plan.why and (lacking := build(plan.cluster).missing(detect())):
        yield f"cluster: {lacking}. Type dtrain plan to see what it would be there, or leave cluster out to train here."


def _gpus(plan: Plan) -> Iterable[str]:
    """Nodes that are all on this host share its GPUs."""
    nodes = plan.nodes if fact(plan.launcher, "here", 1) is None else fact(plan.launcher, "here", 1)
    if plan.device == "cpu" or nodes <= 1:
        return
    there = detect().gpus
    if nodes * plan.devices > there:
        fewer = f"devices={there // nodes}, " if there >= nodes else ""
        yield (
            f"nodes={plan.nodes} devices={plan.devices}: {nodes} nodes are on this host, which has {there} GPU(s). "
            f"Type {fewer}nodes=1, launcher.here=1 launcher.address=<host>:<port> if the other nodes are other hosts, "
            "or backend=gloo for CPU processes."
        )


def _devices(plan: Plan) -> Iterable[str]:
    """The GPUs of a node with a host of its own."""
    if plan.device == "cuda" and (there := detect().gpus) < plan.devices:
        yield f"devices={plan.devices}: this node has {there} GPU(s)."


def limits(plan: Plan) -> Iterable[str]:
    """Limits of open files and processes: a run that exceeds one fails in odd places."""
    files, need = resource.getrlimit(resource.RLIMIT_NOFILE)[0], fewest_files(plan.world)
    if files != resource.RLIM_INFINITY and files < need:
        yield f"{files} open files are allowed, and a rank of {plan.world} needs {need} (ulimit -n {2 * need})."
    tasks, need = tasks_left(), plan.devices * (plan.threads + TASKS)
    if tasks is not None and tasks < need:
        yield (
            f"{max(0, tasks)} more processes and threads are allowed, and the ranks here need about {need} (ulimit "
            "-u, or the control group's pids.max)."
        )


def fewest_files(world: int) -> int:
    """The open files that a rank needs: one for each other rank, and some."""
    return FEWEST_FILES + world // 2


def tasks_left() -> int | None:
    """How many more processes and threads this user may have, by ulimit (which does not bind root) and by control
    group; None without a limit.
    """
    left = []
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        left.append(int((group / "pids.max").read_text("utf-8")) - int((group / "pids.current").read_text("utf-8")))
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:
        left.append(soft - sum(map(_threads_of_ours, Path("/proc").glob("[0-9]*"))))
    return min(left, default=None)


def _threads_of_ours(process: Path) -> int:
    try:
        return len([*(process / "task").iterdir()]) if process.stat().st_uid == os.getuid() else 0
    except OSError:
        return 0


def _loopback(plan: Plan) -> Iterable[str]:
    """The ranks of a host rendezvous over 127.0.0.1."""
    if "External" in str(plan.launcher["_target_"]):
        return
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        yield (
            f"127.0.0.1 cannot be reached: {why(error)}. A container or network namespace without loopback: type "
            "ip link set lo up."
        )


def _address(plan: Plan) -> Iterable[str]:
    """The address where nodes of other hosts join. For those that an engine starts the command makes a secret; that of
    a scheduler's job is one of the job's first node.
    """
    address, is_elsewhere = plan.launcher.get("address"), fact(plan.launcher, "where") == "elsewhere"
    if not address:
        return
    try:
        host, _ = network.endpoint(network.listening(str(address)))
    except ValueError as error:
        yield f"launcher.address={error}. Type launcher.address=<an address of this host>:<a free port>."
        return
    if weakness := network.weakness(host, os.environ, is_made=is_elsewhere):
        yield f"launcher.address={address}: {weakness}"
    elif is_elsewhere and not fact(plan.launcher, "detached") and (absence := network.absence(host)):
        yield f"launcher.address={address}: {absence}"


def rows(plan: Plan) -> Iterable[str]:
    """Problems with the files of all data."""
    yield from files_of("data", plan.data, plan)
    for name, part in plan.evaluate_sets.items():
        yield from files_of(f"evaluate.sets.{name}", part, plan)


def files_of(key: str, data: Part, plan: Plan) -> Iterable[str]:
    """Problems with the files of data at a dotted key."""

    def problem(part: Part, path: str) -> str:
        if about(part).get("files") == "tokens":
            from dtrain.tokenizer import shards  # numpy, as below

            if shards.is_manifest(path):
                return _shards(part, path)
            if part.get("packing") == "pack":
                return shards.NO_ENDS
        if about(part).get("files") in IMAGES:
            return ""  # a listing of its own, as there may be millions
        if about(part).get("files") == "hf":
            return ""  # a folder, or a name of the hub: its rows are looked at
        files = store.find(path)
        if about(part).get("replayed") and len(files) < plan.mesh.data:
            return (
                f"{len(files)} file(s) for {plan.mesh.data} data-parallel ranks, each of which reads files of its own. "
                f"Type devices= and nodes= of at most {len(files)} such ranks, or write it in more files."
            )
        return _tokens(part, files) if files else "no file is there."

    trained = trained_on(plan) if key == "data" else {}
    for place, part in _parts(key, data):
        for name in ("path", "holdout_path"):
            asked = secrets.opened(part.get(name))
            paths = [asked] if isinstance(asked, str) else asked or []
            if "stdlib" not in paths and str(part["_target_"]).startswith("dtrain."):
                wrong = [text for path in paths for text in _stored(f"{place}.{name}", path, partial(problem, part))]
                rows = partial(_rows, plan, place, part, paths, trained=trained.get(place))
                yield from wrong or (rows() if name == "path" and paths else ())


def _parts(place: str, part: Part) -> Iterable[tuple[str, Part]]:
    """(dotted key, part) of a part, and of the sources of a mixture."""
    yield place, part
    name = about(part).get("parts")
    for source, each in part[name].items() if name else ():
        yield from _parts(f"{place}.{name}.{source}", each)


def _rows(plan: Plan, place: str, part: Part, paths: Sequence[str], *, trained: str | None) -> Iterable[str]:
    """The problem with files of rows, if any: its columns, both ends of each, and all of them where they are few.
    `trained`: the fingerprint of those that the run was trained on.
    """
    format = about(part).get("files")
    if format == "tokens" or not (format or part.get("column")):
        return
    from dtrain.chat import rowtext  # numpy, as below
    from dtrain.files import records, rowfile

    try:
        if format == "chat":
            from dtrain.chat import files

            pairs = bool(about(plan.objective).get("pairs"))
            text = files.problem({**part, "path": paths}, trained=trained, pairs=pairs)
        elif format in IMAGES:
            text = records.problem({**part, "path": paths}, format, trained=trained)
        else:
            reader = rowfile.reader_of(part, paths, format, rowtext.encoder_of(part) if format else None)
            text = rowfile.problem(reader, reader.found(paths), part, trained=trained)
    except PreflightError as error:
        text = str(error)
    if text:
        yield f"{place}{text.removeprefix('data')}" if text.startswith(("data.", "data:")) else text


def _stored(key: str, url: str, problem: Callable[[str], str | None]) -> Iterable[str]:
    """The problem with what is stored at a URL, or with the storage."""
    try:
        text = problem(url)
    except StoreError as error:
        text = str(error)
    if text:
        yield f"{key}={cut(url, LONGEST)}: {text}"


def _shards(part: Part, path: str) -> str:
    """The problem with token shards, if any: one that is not there, or the vocabulary of another tokenizer."""
    from dtrain.tokenizer import shards

    manifest = shards.read(path)
    vocab = int(manifest.facts["vocab"])
    if not vocab <= part["vocab"] <= -(-vocab // PADDED) * PADDED:
        return (
            f"its tokens are of a tokenizer with {vocab}, not of data.vocab={part['vocab']}. Type data.vocab={vocab}, "
            f"or a multiple of 64 or 128 above it."
        )
    problem = manifest.problem()
    if problem or part.get("packing") != "pack" or not store.is_local(manifest.folder):
        return problem
    import numpy as np

    from dtrain.files import rowlengths

    ends = [shards.ends_of(manifest, shard) for shard in manifest.shards]
    try:
        rowlengths.check(np.concatenate([np.diff(each, prepend=0) for each in ends]), part["sequence"])
    except PreflightError as error:
        return str(error)
    return ""


def _tokens(part: Part, files: Sequence[str]) -> str:
    """The problem with local files of tokens, if any; the ranks copy remote ones."""
    if about(part).get("files") != "tokens" or not all(map(store.is_local, files)):
        return ""
    from dtrain.files import tokenfile  # numpy, which the parent needs for these alone

    arrays = [tokenfile.opened(store.local_path(file), file, part["dtype"]) for file in files]
    return tokenfile.outside(arrays, part["vocab"], most=LOOKED_AT)


def _packages(plan: Plan) -> Iterable[str]:
    theirs = any(str(part["_target_"]).startswith("torchmetrics.") for part in plan.evaluate_metrics.values())
    if theirs and importlib.util.find_spec("torchmetrics") is None:
        yield "evaluate.metrics needs the torchmetrics package. Type: pip install 'dtrain[metrics]'"
    if fact(plan.adapter, "packs") and importlib.util.find_spec("bitsandbytes") is None:
        yield "adapter: a base in 4 bits needs the bitsandbytes package. Type: pip install 'dtrain[qlora]'"
    for package in plan.trust if not theirs else [each for each in plan.trust if each != "torchmetrics"]:
        try:
            spec = importlib.util.find_spec(package.split(".")[0])
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            yield f"trust=[{package}]: there is no such package in {sys.prefix} nor in this folder."


def _hub(plan: Plan) -> Iterable[str]:
    """Repositories that are neither on the hub nor in its cache."""
    for key, name in (*hub.named(plan.model, "model"), *hub.named(plan.data, "data")):
        if lacking := hub.absent(name):
            yield (
                f"{key}={name}: {lacking}. Type {screen.typed(f'{key}=<a folder>')}, or fetch it where there is a "
                f"network: hf download {name}"
            )


def _source(plan: Plan) -> Iterable[str]:
    """Whether the checkpoint that a new run begins with is there, and of a run that this one can continue."""
    key, url = ("fork", plan.fork) if plan.fork else ("init", plan.init)
    if not url:
        yield from _based(plan)
        return
    try:
        if any(one.is_committed for one in attempts.listed(plan.out)):
            return  # it goes on from its own
        if key == "init" and not is_ours(url):
            yield from _foreign(plan, url)
        elif not store.children(url) and not attempts.best_at(url):
            yield f"{key}={cut(url, LONGEST)}: nothing is there."
        elif key == "fork":
            yield from _continues(plan, url, next((one for one in attempts.listed_at(url) if one.is_committed), None))
        elif plan.init_names is not None:
            yield f"init_names: {cut(url, LONGEST)} is a run of dtrain, with the names of its own model. Leave it out."
    except StoreError as error:
        more = other_weights(plan.model, url, adapter=plan.adapter)
        end = "." if more and not str(error).endswith((".", "?")) else ""
        yield f"{key_of(plan.model, url) or key}={cut(url, LONGEST)}: {error}{end}{more}"


def _foreign(plan: Plan, url: str) -> Iterable[str]:
    """Faults that the headers of a checkpoint of others show, and its table of names, before the model is there."""
    rules, weights = names.table(plan.init_names), open_at(url)
    yield from resized(plan.model, url, weights.config or {}, adapter=plan.adapter)
    for fault in names.renamed(weights.tensors, rules)[1]:
        yield f"init_names: {fault}. {url} has {', '.join(map(plain, list(weights.tensors)[:3]))} and others."


def _based(plan: Plan) -> Iterable[str]:
    """Whether an adapter has weights to adapt: of its own run, if no other is named."""
    if fact(plan.adapter, "trains") != "adapter":
        return
    try:
        if any(one.is_committed for one in attempts.listed(plan.out)):
            return
    except StoreError:  # another check says so
        return
    yield no_base(plan.model)


def _continues(plan: Plan, url: str, newest: Attempt | None) -> Iterable[str]:
    """Whether steps are left after the checkpoint, and its position is one of this run. The ranks compare the rest."""
    fork = f"fork={cut(url, LONGEST)}"
    if newest is None:
        yield (
            f"{fork}: there is no committed checkpoint."
            + f" Type {screen.typed(f'init={cut(url, LONGEST)}')} for weights of others." * (not is_ours(url))
        )
        return
    for key, last in ("steps", plan.steps), ("stop_after", plan.stop_after):
        if last is not None and last <= newest.step:
            yield f"{fork} has done {newest.step} steps, but {key}={last}. Type {key}=<more than {newest.step}>."
    there = described(newest.url.split("/checkpoints/")[0]) or plan.decided()
    for key, theirs, mine in ("seed", there.get("seed"), plan.seed), ("batch", there["batch"]["size"], plan.batch.size):
        if theirs != mine:
            yield (
                f"{fork} was trained with {key}={theirs}, which its position depends on, but {key}={mine}. Type "
                f"{key}={theirs}, or {screen.typed(f'init={cut(url, LONGEST)}')} to take its weights alone."
            )


def _resume(plan: Plan) -> Iterable[str]:
    """Whether checkpoints exist; the ranks check whether they are damaged."""
    try:
        there = any(name.startswith("step-") for name in store.children(store.join(plan.out, "checkpoints")))
    except StoreError as error:
        yield f"out={cut(plan.out, LONGEST)}: {error}"
        return
    if plan.resume == "must" and not there:
        yield f"resume=must: there is no checkpoint under {plan.out}. Type resume=auto to start from the beginning."
    if plan.resume == "never" and there:
        yield f"resume=never: {plan.out} has a run already. Type out=<another place>, or resume=auto to continue it."


OF_NODE = (_machine, _gpus, limits, _loopback, rows, _packages, _hub, trackers.problems)
"""Checks of the host on which ranks run."""
ALONE = (_gpus, _loopback, trackers.problems)  # of the host that has the first rank
OF_RUN = (_address, _source, teacher.problems, _resume)
"""Checks of the command's host, and of the storage."""
