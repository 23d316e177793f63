"""A Ray cluster of three nodes, all on loopback, which ends with the process that started it. It ignores SIGINT, as
what a script starts by `&` does, and its workers inherit that.

python tests/ray_cluster.py <folder>    # prints its address and the raylet of its head; kills the node of each raylet on standard input
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NODES, STORE = 3, 100_000_000
LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the address of the default route."""
TESTS = Path(__file__).parent
PATH = os.pathsep.join([str(TESTS.parent), str(TESTS)])
"""Where Ray's workers find dtrain, and the tests' modules."""


@dataclass
class Cluster:
    address: str
    head: int
    """The pid of Ray's process (raylet) of the first node."""
    folder: Path
    process: Any

    def kill_node(self, raylet: int) -> None:
        """Kill the node of a raylet. Another starts in its place."""
        self.process.stdin.write(f"{raylet}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "killed\n"


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """The cluster, or the test is skipped."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not here. Type: pip install 'dtrain[ray]'")
    folder = tempfile.mkdtemp(prefix="ray-")  # short, for the names of its sockets
    process = subprocess.Popen(
        [sys.executable, __file__, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        address, head = process.stdout.readline().split()
        yield Cluster(address, int(head), Path(folder), process)
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
        shutil.rmtree(folder)


def main(folder: str) -> None:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
    Path(folder, "ray").mkdir()  # for the file with its address, which Ray writes where nobody made a folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ray.cluster_utils import Cluster

    how = {"num_cpus": 2, "object_store_memory": STORE, "temp_dir": folder, "node_ip_address": LOOPBACK}
    output = os.dup(1)
    os.dup2(2, 1)  # Ray prints
    cluster = Cluster(initialize_head=True, head_node_args={**how, "include_dashboard": False})
    nodes = {
        raylet_of(node): node for node in (cluster.head_node, *(cluster.add_node(**how) for _ in range(NODES - 1)))
    }
    cluster.wait_for_nodes()
    os.write(output, f"{cluster.address} {next(iter(nodes))}\n".encode())
    for line in sys.stdin:
        cluster.remove_node(nodes.pop(int(line)), allow_graceful=False)
        os.write(output, b"killed\n")
        node = cluster.add_node(**how)
        nodes[raylet_of(node)] = node
    cluster.shutdown()


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


if __name__ == "__main__":
    main(sys.argv[1])
