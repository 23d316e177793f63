"""Nodes of a Ray cluster of three: the losses of local nodes, actors and nodes that are killed, and nothing left of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import ray_cluster
from commands import COMMAND, Forked
from killing import descendants
from ray_cluster import Cluster

from dtrain.integrations.ray import driver
from dtrain.integrations.ray.driver import Node
from dtrain.launcher.process import parent_of
from dtrain.testing.engine import EngineTests, _folder, _rows, _starts, _steps, agents

SMALL = (
    "model=mlp", "data=synthetic", "objective=regression", "strategy=ddp", "nodes=2", "devices=2", "batch=8", "hook=[]",
    "logger=[]", "steps=6", "out=run", "launcher=ray",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster.running() as cluster:
        yield cluster


def drivers(command: int) -> list[int]:
    """The process of a command that speaks with Ray."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(command)}
    return [pid for pid, line in lines.items() if b"dtrain.integrations.ray.driver" in line]


@pytest.mark.campaign("kills")
class TestRay(EngineTests):
    start = Forked
    slow = (
        "test_a_killed_agent_starts_again", "test_a_second_ctrl_c_ends_all", "test_the_first_error_of_a_rank_is_shown",
        "test_nodes_with_another_version_of_a_package_are_refused_by_name",
        "test_a_killed_command_takes_its_run_with_it_or_finds_it_again", "test_a_killed_node_is_replaced_by_another",
        "test_the_process_that_speaks_with_ray_starts_again",
    )  # fmt: skip

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.words = ["launcher=ray", f"launcher.cluster={cluster.address}", "launcher.wait=30"]

    def test_a_killed_actor_starts_again(self, tmp_path: Path) -> None:
        self._goes_on(tmp_path, lambda command, *agents: os.kill(parent_of(agents[0]), signal.SIGKILL))

    def test_a_killed_node_is_replaced_by_another(self, tmp_path: Path) -> None:
        def kill(command: int, *agents: int) -> None:
            raylets = [parent_of(parent_of(agent)) for agent in agents]
            self.cluster.kill_node(next(raylet for raylet in raylets if raylet != self.cluster.head))

        self._goes_on(tmp_path, kill)

    def test_the_process_that_speaks_with_ray_starts_again(self, tmp_path: Path) -> None:
        self._goes_on(tmp_path, lambda command, *agents: os.kill(*drivers(command), signal.SIGKILL))

    def _goes_on(self, tmp_path: Path, kill: Callable[..., None]) -> None:
        folder = _folder(tmp_path)
        with self._running(folder, "steps=1000") as command:
            deadline = time.monotonic() + self.seconds
            while not list((folder / "run" / "checkpoints").rglob("COMMIT.json")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            kill(command.pid, *agents(folder))
            assert command.wait(self.seconds) == 0
        assert _steps(folder / "run") == [*range(1, 1001)] and _starts(folder / "run")[-1] >= 10

    def test_the_secret_is_nowhere_and_what_ranks_print_is_on_the_terminal(self, tmp_path: Path) -> None:
        folder, secret = _folder(tmp_path), "0123456789-a-secret"
        self.environment = {**os.environ, "DTRAIN_SECRET": secret, "PYTHONPATH": ray_cluster.PATH}
        words = ("data=dataset", "data.dataset._target_=ray_rows.Loud", "trust=[ray_rows]", "data.outputs=3")
        words = (*words, "data.inputs=pixels", "data.targets=label", "objective=classification", "steps=6", "out=run")
        output = self._ends(folder, 0, *SMALL, *words, *self.words)
        assert all(f"read by rank {rank}" in output for rank in range(4)), output
        places = [path for place in (folder, self.cluster.folder) for path in place.rglob("*") if path.is_file()]
        assert len(places) > 10 and not [path for path in places if secret.encode() in path.read_bytes()]

    def test_more_nodes_than_the_cluster_has_are_refused(self, tmp_path: Path) -> None:
        words = [*SMALL, *self.words, "launcher.wait=0"]
        output = self._ends(tmp_path, 3, *words, "nodes=4")
        assert (
            "nodes=4 with devices x threads = 2 CPU each, and the cluster has 3 node(s): 2 CPU, 2 CPU, 2 CPU." in output
        )
        assert "Type nodes=3, or devices= and threads= that fit." in output and "Traceback" not in output
        assert "cluster has 3 node(s): 2 CPU, 2 CPU, 2 CPU. Type devices=" in self._ends(
            tmp_path, 3, *words, "devices=3", "batch=12"
        )

    def test_fewer_nodes_are_enough_where_the_plan_says_so(self, tmp_path: Path) -> None:
        self._ends(tmp_path, 0, *SMALL, *self.words, "launcher.wait=1", "nodes=3:4", "batch=24")
        assert len(_rows(tmp_path / "run")) == 6


@pytest.mark.parametrize(
    ("cluster", "code", "sentence"),
    [
        (
            "'a b'",
            2,
            "launcher.cluster=a b: a b is not <host>:<port>. Type launcher.cluster=<host>:<port>, or ray://<host>:<port>",
        ),
        ("127.0.0.1:1", 3, "no Ray cluster answers at 127.0.0.1:1: connection refused"),
        ("127.0.0.1:99999", 2, "127.0.0.1:99999 is not <host>:<port>"),
    ],
)
def test_what_is_no_cluster_is_refused(cluster: str, code: int, sentence: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not here. Type: pip install 'dtrain[ray]'")
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = commands.run(*SMALL, f"launcher.cluster={cluster}", cwd=tmp_path, env=env)
    assert done.returncode == code and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="a namespace without other tests' clusters needs root")
def test_a_host_that_is_no_node_of_a_cluster_is_told(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not here. Type: pip install 'dtrain[ray]'")
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": str(tmp_path)}
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *COMMAND, *SMALL]
    done = subprocess.run(alone, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert "this host is no node of a Ray cluster, and there is no RAY_ADDRESS" in done.stderr


def test_ray_is_named_where_it_is_not_installed(tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; sys.argv[0] = 'dtrain'; from dtrain.__main__ import main; sys.exit(main())"
    done = commands.python("-c", code, *SMALL, cwd=tmp_path)
    assert done.returncode == 3 and "Type pip install 'dtrain[ray]'" in done.stderr, done.stderr


def test_an_actor_that_was_lost_is_told_in_a_few_words(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not here. Type: pip install 'dtrain[ray]'")

    def lost(*_: object) -> None:
        raise ray.exceptions.ActorUnavailableError("RpcError: RPC error: Socket closed rpc_code: 14", b"\0" * 16)

    ended = list[int]()
    cluster = driver.Cluster([1], {"CPU": 1}, ".", ended.append)
    cluster._nodes, cluster._actors = 1, {0: SimpleNamespace(run=SimpleNamespace(remote=lost))}
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    cluster._run(0, [], {})
    assert ended == [0]
    assert capfd.readouterr().err == "dtrain: node 0 of Ray: its actor was lost, or the host that it was on\n"


def test_a_node_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Node().look(str(tmp_path)) == ""
    assert f"has no folder {tmp_path}/none. Type the words in a folder that all nodes share" in Node().look(
        f"{tmp_path}/none"
    )
    if sys.prefix == sys.base_prefix:
        pytest.skip("this Python is in no virtual environment, outside of which torch would be missing")
    monkeypatch.setattr(sys, "executable", sys._base_executable)
    assert "which is Ray's there, lacks" in Node().look(str(tmp_path))
