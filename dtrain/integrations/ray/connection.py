"""Connects this process to a Ray cluster that is running."""

import os
import socket

from dtrain.cluster.network import endpoint
from dtrain.config.word import cut
from dtrain.errors import PreflightError, WordsError, why

CLIENT, TOKEN = "ray://", "RAY_AUTH_MODE"
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_server_request_timeout_seconds": "10"}
"""No report of its use is sent; a cluster answers, and Ray's process on this host is found, within that time."""
NONE_HERE = ("Could not find any running Ray instance", "Failed to connect to Ray cluster")
"""Messages of Ray on a host without a cluster, and on one whose last cluster was killed."""
REACH_SECONDS = 5.0
"""Time for the head of a cluster to accept a connection."""


def refuse(cluster: str | None, key: str) -> None:
    """Raises WordsError for an address that is none. `key`: the word that has it."""
    try:
        endpoint(cluster.removeprefix(CLIENT)) if cluster is not None else None
    except ValueError as error:
        raise WordsError(
            f"{key}={cut(str(cluster))}: {error}. Type {key}=<host>:<port>, or ray://<host>:<port>; ray start --head "
            "shows it."
        ) from error


def connect(cluster: str | None, key: str) -> str:
    """Connect to the cluster at an address; without one, to that of RAY_ADDRESS or the one that this host is a node of.
    Returns the host of its head. Raises PreflightError.

    Ray sets handlers of signals and of errors of this process, and starts threads.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise PreflightError(f"Ray cannot be imported: {error}. Type pip install 'dtrain[ray]'") from error
    where = cluster or os.environ.get("RAY_ADDRESS") or "auto"
    if where != "auto":
        _reach(where, key)
    if ray.is_initialized():
        return _head(where)
    try:
        ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except (ray.exceptions.RayError, ImportError, OSError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split()).removesuffix(".")
        if where == "auto" and any(said in text for said in NONE_HERE):
            raise PreflightError(
                f"this host is no node of a Ray cluster, and there is no RAY_ADDRESS. Type {key}=<host>:<port>, or "
                "start one: ray start --head"
            ) from error
        token = "" if TOKEN in os.environ else f" If it wants a token, type {TOKEN}=token before the command."
        raise PreflightError(f"the Ray cluster at {where} does not take this process: {text}.{token}") from error
    return _head(where)


def _reach(where: str, key: str) -> None:
    try:
        socket.create_connection(endpoint(where.removeprefix(CLIENT)), timeout=REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = why(error) if isinstance(error, OSError) else error
        raise PreflightError(f"no Ray cluster answers at {where}: {reason}. Type {key}=<host>:<port>") from error


def _head(where: str) -> str:
    import ray

    address = where if where.startswith(CLIENT) else str(ray.get_runtime_context().gcs_address)
    return endpoint(address.removeprefix(CLIENT))[0]
