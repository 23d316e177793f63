"""Decides the number of ranks, their device and backend, the precision, the launcher and the threads per rank."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtrain.cluster import Cluster
from dtrain.cluster.allocation import External
from dtrain.config.facts import Part, about, fact
from dtrain.config.schema import Config
from dtrain.errors import WordsError

TENSOR_CORES = 8.0
"""First compute capability whose tensor cores support bf16."""


def choose(config: Config, group: str, word: str, why: dict[str, str], reason: str) -> Part:
    """The arguments of the chosen word of a group. `auto` means `word`, and `reason` is recorded in `why`."""
    if config.choices[group] != "auto":
        return dict(getattr(config, group))
    why[group] = f"{word} (auto: {reason})"
    return dict(config.options[group][word])


def counts(config: Config, cluster: Cluster) -> list[Any]:
    """Allowed numbers of nodes in descending order; just `nodes` itself if it is no valid range."""
    match = re.fullmatch(r"(\d+):(\d+)", str(config.nodes))
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        return [config.nodes]
    allowed = range(int(match[2]), int(match[1]) - 1, -1)
    outer = _outer(config, cluster)
    if not outer or outer.kind == "nodes":
        return list(allowed)
    return [outer.nodes] if outer.nodes in allowed else [allowed[0]]


def placed(config: Config, cluster: Cluster) -> tuple[Config, Cluster]:
    """The nodes that another launcher has started, unless the words say how many. A task of an Indexed Job is a node
    only of a run that has several.
    """
    outer = cluster.external
    if outer and not outer.world and str(config.nodes) == "1":
        return config, replace(cluster, external=None)
    outer = _outer(config, cluster)
    if outer and outer.kind == "nodes" and outer.world and "nodes" not in config.sources:
        least = outer.least or outer.world
        return replace(config, nodes=outer.world if least == outer.world else f"{least}:{outer.world}"), cluster
    return config, cluster


def _outer(config: Config, cluster: Cluster) -> External | None:
    """The place that another launcher gives this process, unless the words name a launcher of dtrain's."""
    around = config.choices["launcher"] == "auto" or fact(config.launcher, "where") == "around"
    return cluster.external if around else None


def devices(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Decide the number of nodes and of processes per node."""
    asked, outer = {"nodes": config.nodes, "devices": config.devices}, _outer(config, cluster)
    if outer and outer.kind == "ranks":
        return _ranks(outer, config, cluster)
    if outer:
        _check_nodes(outer, draft["elastic"] or config.nodes, typed="nodes" in config.sources)
    if config.devices == "auto":
        reason = "one per GPU" if cluster.gpus else "no GPU here"
        reason = "as the launcher of the nodes says" if cluster.devices else reason
        asked["devices"] = cluster.devices or cluster.gpus or 1
        draft["why"]["devices"] = f"{asked['devices']} (auto: {reason})"
    return asked


def _ranks(outer: External, config: Config, cluster: Cluster) -> dict[str, Any]:
    """The nodes and devices of ranks that already run. A launcher that does not tell their number per node has one for
    each GPU, or what the words say.
    """
    per_node, world = outer.local_world, outer.world
    asked = {"nodes": config.nodes, "devices": config.devices}
    if not per_node and isinstance(config.devices, int):
        per_node = config.devices
    elif not per_node and "nodes" in config.sources and isinstance(config.nodes, int):
        per_node = world // config.nodes if world % config.nodes == 0 else 0
    elif not per_node:
        per_node = cluster.gpus
    if not per_node or world % per_node or (outer.local_rank or 0) >= per_node:
        raise WordsError(
            f"{outer.variables} are set for {world} ranks, but how many run on each node is not. Type devices=<ranks "
            "per node>."
        )
    here = {"nodes": world // per_node, "devices": per_node}
    typed = [key for key in here if key in config.sources and asked[key] not in ("auto", here[key])]
    if typed:
        raise WordsError(
            f"{' '.join(f'{key}={asked[key]}' for key in typed)}: this process was started as one of "
            f"{world} ranks, {per_node} per node. Leave nodes and devices out."
        )
    return here


def _check_nodes(outer: External, nodes: Any, *, typed: bool) -> None:
    """Raises WordsError if the words want other nodes than a launcher has started."""
    most = str(nodes).rpartition(":")[2]
    if outer.world and typed and most != str(outer.world):
        raise WordsError(
            f"nodes={nodes}: this process was started as one of {outer.world} nodes ({outer.variables}). Leave "
            "nodes out."
        )
    if not outer.world and most.isdecimal() and outer.rank >= int(most):
        raise WordsError(
            f"nodes={nodes}, but {outer.row.rank}={outer.rank}, which counts from 0. Type nodes=<completions of "
            "the job>."
        )


def world(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Check that the launcher matches the ranks that exist, and that elastic ranks can rendezvous again."""
    word, where = config.choices["launcher"], fact(config.launcher, "where")
    if where == "around" and not cluster.external:
        raise WordsError(
            f"launcher={word}: no RANK and WORLD_SIZE in the environment, nor what other launchers set. Start it as: "
            f"torchrun --nproc-per-node 2 -m dtrain launcher={word}"
        )
    outer = _outer(config, cluster)
    if outer and outer.kind == "ranks":
        unused = [key for key in ("launcher.restarts", "launcher.silence") if key in config.sources]
        if unused:
            raise WordsError(f"{' '.join(unused)}: {outer.row.name} restarts its ranks itself. Leave it out.")
    if cluster.external and cluster.external.world > 1 and where in ("here", "elsewhere"):
        raise WordsError(
            f"launcher={word}: this process is one of {cluster.external.world} {cluster.external.kind} already, each "
            "would train the whole run. Leave launcher out."
        )
    if cluster.external and cluster.external.one_store and draft["elastic"]:
        raise WordsError(
            f"nodes={draft['elastic']}: restarted ranks hang on keys that the previous ones left in torchrun's store. "
            "Type TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ..."
        )
    most, ranks = fact(config.launcher, "most"), draft["nodes"] * draft["devices"]
    if most is not None and ranks > most:
        raise WordsError(
            f"launcher={word} is {'one rank' if most == 1 else f'{most} ranks'}, but nodes x devices = {ranks}. Type "
            "launcher=local."
        )
    return {}


def _check_started(outer: External | None, config: Config, starters: list[str]) -> None:
    """Raises WordsError if a backend needs ranks that one of these launchers has started."""
    if outer and outer.kind == "ranks" and outer.row.name in starters:
        return
    who = f"{outer.row.name} started this process" if outer else "nothing has started ranks here"
    word = config.choices["backend"]
    raise WordsError(
        f"backend={word}: its ranks are started by {' or '.join(starters)}, and {who}. Type mpirun -np <ranks> "
        f"python -m dtrain backend={word} <the other words>, without launcher, or leave backend out."
    )


def backend(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Choose nccl for GPUs and gloo otherwise; the device follows from the backend."""
    fits = cluster.gpus >= draft["devices"]
    if cluster.gpus and not fits and config.choices["backend"] == "auto":
        who = "this host" if config.choices["cluster"] == "auto" else f"a node of cluster={config.choices['cluster']}"
        nodes = f"nodes={draft['nodes'] * -(-draft['devices'] // cluster.gpus)} " if who != "this host" else ""
        raise WordsError(
            f"devices={draft['devices']}: {who} has {cluster.gpus} GPU(s). Type {nodes}devices={cluster.gpus}, or "
            "backend=gloo for CPU processes."
        )
    reason = "one GPU per process" if cluster.gpus else "no GPU here"
    part = choose(config, "backend", "nccl" if cluster.gpus else "gloo", draft["why"], reason)
    if starters := about(part).get("started_by"):
        _check_started(_outer(config, cluster), config, starters)
    device = about(part).get("device", "cpu")
    if device == "cuda" and not fits:
        raise WordsError(
            f"backend={config.word('backend')} needs {draft['devices']} GPU(s), this host has {cluster.gpus}. Type "
            "backend=gloo."
        )
    return {"backend": _fill_auto(part, draft["nodes"] * draft["devices"], draft["why"]), "device": device}


def _fill_auto(part: Part, ranks: int, why: dict[str, str]) -> Part:
    """Replace `auto` in the arguments of a GPU backend, and record the reasons in `why`."""
    choices = {
        "connect": ("start", "connection problems between GPUs are reported before the first step"),
        "segments": ("expandable", "less memory is lost to fragmentation"),
        "cores": ("near", "the cores next to a GPU reach it fastest"),
    }
    if ranks == 1:
        choices["connect"] = "use", "a single GPU has no connections"
    for name, (word, reason) in choices.items():
        if part.get(name) == "auto":
            part, why[f"backend.{name}"] = {**part, name: word}, f"{word} (auto: {reason})"
    return part


def compiled(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Compile blocks on a GPU, where fusing memory-bound operations pays; on a CPU compilation takes seconds and does
    not reliably gain any.
    """
    word, reason = ("blocks", "on a GPU") if draft["device"] == "cuda" else ("none", "on the CPU")
    part, ranks = choose(config, "compile", word, draft["why"], reason), draft["nodes"] * draft["devices"]
    most = fact(part, "most")
    if most is not None and ranks > most:
        raise WordsError(
            f"compile={config.word('compile')} is for {'one rank' if most == 1 else f'{most} ranks'}, but nodes x "
            f"devices = {ranks}. Type compile=blocks."
        )
    return {"compile": part}


def precision(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Choose bf16 where tensor cores support it and fp32 elsewhere; refuse a precision that the device lacks."""
    flops = draft["cluster"].get("flops") or {"bf16": 1.0}
    fast = flops.get("bf16", 0.0) > flops.get("fp32", 0.0) and not 0 < cluster.capability < TENSOR_CORES
    word, reason = "fp32", "on the CPU"
    if draft["device"] == "cuda" and fast:
        word, reason = "bf16", "on a GPU"
    elif draft["device"] == "cuda":
        reason = "bf16 is no faster on this GPU; precision=fp16 may be"
    part = choose(config, "precision", word, draft["why"], reason)
    needs = about(part).get("device", draft["device"])
    if needs != draft["device"]:
        raise WordsError(
            f"precision={config.word('precision')} needs {needs}, this run is on {draft['device']}. Type "
            "precision=bf16."
        )
    if draft["device"] == "cuda" and draft["cluster"]:
        _check_type(config, part, flops, f"cluster={config.choices['cluster'] or 'of yours'}", cluster.gpu)
    return {"precision": part}


def _check_type(config: Config, part: Part, flops: Mapping[str, float], named: str, gpu: str) -> None:
    """Raises WordsError if the GPUs compute no products of the type that a precision has."""
    kind = fact(part, "flops", fact(part, "compute", "fp32"))
    if kind in flops:
        return
    who = f"the {gpu} of this host" if config.choices["cluster"] == "auto" else named
    other = next((word for word in ("bf16", "fp16", "fp32") if word in flops), "fp32")
    raise WordsError(
        f"precision={config.word('precision')}: {who} has no products in {kind}, only in "
        f"{', '.join(flops)}. Type precision={other}."
    )


def launcher(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Choose external under another launcher, inline for one rank, local for more."""
    ranks = draft["nodes"] * draft["devices"]
    word, reason = ("inline", "one rank") if ranks == 1 else ("local", f"{ranks} ranks")
    if outer := _outer(config, cluster):
        names = outer.variables
        word, reason = "external", f"{names} {'are' if ' and ' in names else 'is'} set"
    return {"launcher": choose(config, "launcher", word, draft["why"], reason)}


def threads(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Use `threads` or OMP_NUM_THREADS if set; otherwise divide the CPU cores among the processes that share them."""
    if config.threads != "auto":
        return {"threads": config.threads}
    if cluster.threads:
        return {"threads": cluster.threads}
    # whether every node is a machine of its own, or all nodes share this one
    elsewhere = fact(config.launcher, "where") == "elsewhere"
    separate = _outer(config, cluster) or elsewhere or (cluster.gpus and config.choices["cluster"] != "auto")
    here = draft["devices"] * (1 if separate else draft["nodes"])
    return {"threads": max(1, cluster.cpus // here)}
