"""Nodes that ssh reaches: it starts an agent on each host, with your own configuration of ssh, keys and jump hosts.

The agent's variables, the run's secret among them, come over its standard input. It is a child of the connection's
process on its host, and ends with it.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from dtrain.config import home
from dtrain.config.installed import python, version
from dtrain.config.word import cut
from dtrain.errors import PreflightError, WordsError, why
from dtrain.launcher.bundle import bundle
from dtrain.launcher.children import Children
from dtrain.launcher.local import attached
from dtrain.planned import Plan
from dtrain.result import Result, source_digest

HOST = re.compile(r"(?P<name>(?:[\w.-]+@)?(?:[A-Za-z0-9][\w.-]*|\[[0-9A-Fa-f:.]+\]))(?::(?P<port>[0-9]{1,5}))?")
"""`host`, `user@host`, `host:port`, `user@[IPv6 address]:port`; a host may be a name of your ssh configuration."""
OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)
"""ssh asks for no password, and ends a minute after the other host went silent."""
CONNECTIONS = 32
"""Hosts that are tried at the same time."""
LOOK_SECONDS, BRING_SECONDS = 30.0, 600.0
"""Time for a host to answer before the run, and to take the working folder."""
PLACE = ".cache/dtrain/code"
"""Below the home folder of a host: what was brought there, each state in a folder of its own."""
BRING = "{{ test -d {place} || {{ mkdir -p {place}.$$ && tar -xzf - -C {place}.$$ && mv {place}.$$ {place}; }}; }}"
"""For the shell of a host: unpack the standard input, unless that was done before."""
PROBE = """
import json, sys
from importlib import metadata
import dtrain, torch
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return ""
try:
    from dtrain.result import source_digest
    source = source_digest("dtrain")
except ImportError: source = ""
python = ".".join(map(str, sys.version_info[:2]))
print(json.dumps({"source": source, "dtrain": version("dtrain"), "torch": version("torch"), "Python": python}))
"""
"""For the interpreter of a host, whose dtrain may be any: its versions. Agents of another dtrain could not say so."""


class Ssh:
    """One node on each of `hosts`, the first of them where more are given than the plan has nodes. `hostfile`: a file
    with a host on each line, instead. `folder`: the working folder there; null: as here. `sync`: bring the folder, to
    a place of its own there. `python`: the interpreter there. `options`: more arguments of ssh, as in a shell.
    """

    about: ClassVar = {"where": "elsewhere"}

    def __init__(
        self, *, hosts: Sequence[str], hostfile: str | None, folder: str | None, sync: bool, python: str,
        options: str, restarts: int, silence: float, wait: float, address: str | None,
    ) -> None:  # fmt: skip
        self._hosts = [*hosts] if hostfile is None else [*_lines(Path(hostfile))]
        self._named_in = "launcher.hosts" if hostfile is None else f"launcher.hostfile={hostfile}"
        if sync and folder:
            raise WordsError(
                f"launcher.folder={folder} names the code on the hosts, and launcher.sync=true brings it. Leave one "
                "out."
            )
        self._place = f"{PLACE}/<digest>" if sync else folder or str(Path.cwd())
        self._sync, self._python, self._options = sync, python, _split(options)
        self._serving: dict[str, Any] = {"restarts": restarts, "silence": silence, "wait": wait, "address": address}
        self._children = Children()

    def describe(self, plan: Plan) -> str:
        """The command line of each node. Raises WordsError for hosts that are none, or too few."""
        if problems := [*_wrong(self._hosts, plan.nodes, self._named_in)]:
            raise WordsError(*problems)
        command = [self._python, "-m", "dtrain.launcher.local.agent", "<address>", "-"]
        return "\n".join(shlex.join(self._ssh(host, command)) for host in self._hosts[: plan.nodes])

    def launch(self, plan: Plan) -> Result:
        return attached.launch(plan, engine=self, **self._serving)

    def prepare(self, plan: Plan) -> None:
        self.describe(plan)
        if not shutil.which("ssh"):
            raise PreflightError("launcher=ssh: ssh is not installed here. Install an OpenSSH client.")
        archive, digest = bundle(plan.out) if self._sync else (b"", "")
        self._place = f"{PLACE}/{digest}" if self._sync else self._place
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            problems = [*filter(None, pool.map(partial(self._look, archive), self._hosts[: plan.nodes]))]
        if problems:
            raise PreflightError(*problems)

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        for node in nodes:
            ssh = self._ssh(self._hosts[node], [self._python, *command[1:], "-"])
            self._children.start([node], ssh, {}, stdin=f"{json.dumps(dict(environment))}\n".encode())

    def alive(self) -> Collection[int]:
        return self._children.alive()

    def stop(self) -> None:
        self._children.stop()

    def _ssh(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that executes `command` in the working folder of a host."""
        return self._to(host, self._remote(command), *OPTIONS)

    def _remote(self, command: Sequence[str]) -> str:
        return f"cd {shlex.quote(self._place)} && exec {shlex.join(command)}"

    def _to(self, host: str, remote: str, *options: str) -> list[str]:
        parts = HOST.fullmatch(host)
        name, port = (parts["name"], parts["port"]) if parts else (host, None)
        port_options = ["-p", port] if port else []
        return ["ssh", *options, *self._options, *port_options, "--", re.sub(r"[][]", "", name), remote]

    def _look(self, archive: bytes, host: str) -> str:
        """Bring the archive of the working folder, if there is one. Returns the problem of a host that cannot be a
        node; empty if there is none.
        """
        remote = f"{BRING.format(place=self._place)} && " if archive else ""
        remote += self._remote([self._python, "-c", PROBE])
        try:
            ended = subprocess.run(
                self._to(host, remote, *OPTIONS), input=archive, capture_output=True,
                timeout=BRING_SECONDS if archive else LOOK_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return f"{host}: it did not answer within {error.timeout:g} s."
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        last = cut((said or ["it says nothing"])[-1]).rstrip(".")
        if ended.returncode == 255:
            return (
                f"{host}: ssh cannot log in there without a password: {last}. Try: {shlex.join(self._to(host, 'true'))}"
            )
        if ended.returncode:
            return (
                f"{host}: {self._python} cannot import dtrain and torch in {self._place}: {last}. Install them there, "
                "or type launcher.python=<its interpreter> or launcher.folder=<its folder>."
            )
        return _unlike(host, ended.stdout.decode(errors="replace"))


def _unlike(host: str, answer: str) -> str:
    """How the versions of a host, as PROBE tells them, differ from those here; empty if they do not."""
    here = {
        "source": source_digest("dtrain"), "dtrain": version("dtrain"), "torch": version("torch"),
        "Python": ".".join(python().split(".")[:2]),
    }  # fmt: skip
    try:
        there = {name: str(value) for name, value in json.loads(answer.splitlines()[-1]).items()}
        other = [name for name in here if there[name] != here[name]]
    except (ValueError, LookupError, AttributeError):
        return f"{host}: its Python says {cut(answer.strip() or 'nothing')!r} where it is asked for its versions."
    said = [
        f"{name} is {cut(there[name]) or 'a folder'} there and {here[name] or 'a folder'} here"
        for name in ("dtrain", "torch", "Python")
        if name in other
    ]
    if "source" in other and "dtrain" not in other:
        said.append(f"the source of dtrain {there['dtrain']}".rstrip() + " there is not the one here")
    return f"{host}: {', '.join(said)}. Install the same there." if said else ""


def _split(options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise WordsError(f"launcher.options={cut(options)}: {error}. Quote it as in a shell.") from error


def _lines(hostfile: Path) -> Iterable[str]:
    """The hosts of a file, without comments, and without what follows them as in files of mpirun (`host slots=8`)."""
    try:
        for line in home.expanded(hostfile).read_text("utf-8").splitlines():
            words = line.partition("#")[0].split()
            if words:
                yield words[0]
    except (OSError, UnicodeDecodeError) as error:
        reason = why(error) if isinstance(error, OSError) else "it is no text"
        raise WordsError(f"launcher.hostfile={hostfile}: {reason}. Name a file with a host on each line.") from error


def _wrong(hosts: Sequence[str], nodes: int, where: str) -> Iterable[str]:
    for host in hosts:
        if not HOST.fullmatch(host):
            yield f"{where}: {cut(host)!r} is no host. Type user@host:port, or a name of your ssh configuration."
    for host in sorted({host for host in hosts if hosts.count(host) > 1}):
        yield f"{where} names {host} twice: it would be two nodes. Leave one out, or type devices=<more ranks>."
    if len(hosts) < nodes:
        fewer = f", or type nodes={len(hosts)}" if hosts else ""
        yield f"nodes={nodes}, but {where} has {len(hosts)}. Name a host for each node{fewer}."
