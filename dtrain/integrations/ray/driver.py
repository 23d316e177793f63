"""The process that speaks with Ray for a command. Ray takes over signals, errors and logs of a process that connects,
and starts threads in it, which no fork of the command would survive.

Its standard input is a socket, over which it reads requests and answers, in lines of JSON:

    cluster, nodes, needs, folder, wait      -> head, then ready; or problems
    start (nodes), command, environment      -> ended (a node), for each agent that has ended

It ends all agents, and itself, when the socket is closed; Ray ends the actors, and they the agents, when it is killed.
"""

import contextlib
import json
import math
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.errors import PreflightError, first_line
from dtrain.integrations.ray.connection import connect
from dtrain.secrets import screen

LOOK_SECONDS = 60.0
"""Time for the actors to start, and to look at their nodes."""
FEWER_SECONDS = 3
"""Time to reserve nodes that are free."""
STOP_SECONDS = 5.0
"""Time for an agent to end after SIGTERM."""
CHUNK, CHUNKS = 1 << 16, 256
"""The most bytes of output that are read at once, and how many of these wait for the command."""
FIND = """
import importlib.util, sys
sys.exit(", ".join(name for name in ("dtrain", "torch") if importlib.util.find_spec(name) is None) or 0)
"""


class Node:
    """An actor, in a process of Ray on its node. Ray has threads there, so that the agent is a new process. This class
    is sent to nodes that may lack dtrain, and uses nothing of it.
    """

    def __init__(self) -> None:
        self._output = queue.Queue[tuple[int, bytes]](CHUNKS)
        self._agent: subprocess.Popen[bytes] | None = None

    def look(self, folder: str) -> str:
        """The problem of a node that cannot be one of the run; empty if there is none."""
        here = socket.gethostname()
        if not os.path.isdir(folder):  # noqa: PTH112
            return f"{here} has no folder {folder}. Type the words in a folder that all nodes share."
        ended = subprocess.run(
            [sys.executable, "-c", FIND], cwd=folder, capture_output=True, encoding="utf-8", errors="replace"
        )
        if ended.returncode:
            lacking = (ended.stderr.strip().splitlines() or ["it says nothing"])[-1]
            return f"{sys.executable} on {here}, which is Ray's there, lacks {lacking}. Install it for this Python."
        return ""

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Execute an agent. Returns when it has ended; it dies with the thread that runs this."""
        import ray

        self._agent = agent = subprocess.Popen(
            [sys.executable, *command[1:], "-"], cwd=folder, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert agent.stdin and agent.stdout and agent.stderr
        variables = {**environment, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        with contextlib.suppress(BrokenPipeError), agent.stdin as stdin:
            stdin.write(f"{json.dumps(variables)}\n".encode())
        with selectors.DefaultSelector() as selector, agent.stdout as stdout, agent.stderr as stderr:
            for number, pipe in (1, stdout), (2, stderr):
                selector.register(pipe, selectors.EVENT_READ, number)
            while selector.get_map():
                ready = selector.select(0.2)
                for key, _ in ready:
                    chunk = os.read(key.fd, CHUNK)
                    if chunk:
                        self._output.put((key.data, chunk))
                    else:
                        selector.unregister(key.fileobj)
                if not ready and agent.poll() is not None:
                    break
        agent.wait()
        self._output.put((0, b""))

    def output(self) -> list[tuple[int, bytes]]:
        """(descriptor, bytes) of what the agent has written since the last call, of which there is some; (0, empty) at
        its end.
        """
        chunks = [self._output.get()]
        while not self._output.empty():
            chunks.append(self._output.get())
        return chunks

    def end(self) -> None:
        """End the agent: by SIGTERM, and by SIGKILL after a while."""
        if self._agent and self._agent.poll() is None:
            self._agent.terminate()
            try:
                self._agent.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._agent.kill()


class Cluster:
    """The nodes that are reserved for a run, and their actors. `allowed`: the numbers of nodes that it may have, the
    largest first. `tell`: called with the node of an agent that has ended.
    """

    def __init__(
        self, allowed: Sequence[int], needs: Mapping[str, int], folder: str, tell: Callable[[int], None]
    ) -> None:
        self._allowed, self._needs, self._folder, self._tell = allowed, needs, folder, tell
        self._actors, self._threads = dict[int, Any](), list[threading.Thread]()
        """Of actors: those that have answered."""
        self._nodes = 0

    def reserve(self, wait: float) -> None:
        """Reserve the nodes, and look at them. `wait`: seconds that others may use them, or the cluster may grow.
        Raises PreflightError.
        """
        import ray
        from ray.util import placement_group, remove_placement_group

        for nodes in self._allowed:
            self._group = placement_group([dict(self._needs)] * nodes, strategy="STRICT_SPREAD", name="dtrain")
            if self._group.wait(max(math.ceil(wait), FEWER_SECONDS)):
                break
            remove_placement_group(self._group)
            wait = 0.0
        else:
            raise PreflightError(_lacking(ray.nodes(), min(self._allowed), self._needs))
        self._nodes = nodes
        actors = [self._actor(node) for node in range(nodes)]
        answers = [actor.look.remote(self._folder) for actor in actors]
        try:
            problems = {problem for problem in ray.get(answers, timeout=LOOK_SECONDS) if problem}
        except ray.exceptions.RayError as error:
            raise PreflightError(f"an actor does not start: {first_line(error)}") from error
        if problems:
            raise PreflightError(*sorted(problems))
        self._actors = dict(enumerate(actors))

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        for node in nodes:
            thread = threading.Thread(target=self._run, args=(node, command, environment), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        import ray
        from ray.util import remove_placement_group

        actors = [*self._actors.values()]
        ends = [actor.end.remote() for actor in actors]
        ray.wait(ends, num_returns=len(ends), timeout=STOP_SECONDS + 1) if ends else None
        deadline = time.monotonic() + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(self._group)
        ray.shutdown()

    def _actor(self, node: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        options = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0)}
        # three of its methods run beside each other
        return ray.remote(Node).options(scheduling_strategy=place, max_concurrency=4, **options).remote()

    def _run(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Pass on the output of a node's agent until it has ended."""
        import ray

        if node >= self._nodes:  # the cluster had no room for it
            self._tell(node)
            return
        try:
            if node not in self._actors:
                actor = self._actor(node)
                if problem := ray.get(actor.look.remote(self._folder)):
                    raise PreflightError(problem)
                self._actors[node] = actor
            actor = self._actors[node]
            run = actor.run.remote(command, environment, self._folder)
            while (chunks := ray.get(actor.output.remote()))[-1][0]:
                _show(chunks)
            _show(chunks[:-1])
            ray.get(run)
        except ray.exceptions.RayActorError:
            screen.complain(f"node {node} of Ray: its actor was lost, or the host that it was on")
        except (ray.exceptions.RayError, PreflightError) as error:
            screen.complain(f"node {node} of Ray: {first_line(error)}")
        finally:
            if node in self._actors:
                ray.kill(self._actors.pop(node))
            self._tell(node)


def _show(chunks: Sequence[tuple[int, bytes]]) -> None:
    for number, chunk in chunks:
        with contextlib.suppress(OSError):  # nobody reads on
            os.write(number, chunk)


def _lacking(nodes: Sequence[Mapping[str, Any]], least: int, needs: Mapping[str, int]) -> str:
    """A sentence: what the cluster has, and what the run needs."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    fit = sum(all(each.get(kind, 0) >= count for kind, count in needs.items()) for each in alive)
    asked = " and ".join(f"{count} {kind}" for kind, count in needs.items())
    there = ", ".join(" and ".join(f"{each.get(kind, 0):g} {kind}" for kind in needs) for each in alive)
    if fit >= least:
        return (
            f"nodes={least} with {asked} each are not free: {fit} node(s) of the cluster have that, and others use it. "
            "Try: ray status"
        )
    fewer = f"nodes={fit}, or " if fit else ""
    return (
        f"nodes={least} with devices x threads = {asked} each, and the cluster has {len(alive)} node(s): {there}. Type "
        f"{fewer}devices= and threads= that fit."
    )


def main() -> None:
    with socket.socket(fileno=0) as connection, connection.makefile() as requests:
        lock = threading.Lock()

        def tell(**message: Any) -> None:
            with lock, contextlib.suppress(OSError):
                connection.sendall(f"{json.dumps(message)}\n".encode())

        request = json.loads(requests.readline())
        try:
            tell(head=connect(request["cluster"], "launcher.cluster"))
            cluster = Cluster(request["nodes"], request["needs"], request["folder"], lambda node: tell(ended=node))
            cluster.reserve(request["wait"])
        except PreflightError as error:
            tell(problems=error.problems)
            return
        tell(ready=True)
        for line in requests:
            message = json.loads(line)
            cluster.start(message["start"], message["command"], message["environment"])
        cluster.stop()


if __name__ == "__main__":
    screen.outlive_readers()
    main()
