"""Two hosts that ssh reaches: an sshd for each, on ports of this host, under a folder of the test.

with hosts(folder) as (names, options):
    subprocess.run(["ssh", *options, "-p", ..., names[0], "true"])
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from servers import free_port

CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/sshd-{port}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""


@contextmanager
def hosts(folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """The names of the hosts, and the options with which ssh reaches them."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if not sshd or os.getuid() != 0:
        pytest.skip(f"{'sshd' if not sshd else 'root'} is not here. Type: apt-get install openssh-server, as root")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    options = ["-i", str(folder / "key"), "-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder}/known"]
    with ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        for port in ports:
            (folder / f"sshd-{port}").write_text(CONFIG.format(port=port, folder=folder))
            log = folder / f"sshd-{port}.log"
            process = subprocess.Popen([sshd, "-D", "-E", log, "-f", folder / f"sshd-{port}"])
            stack.callback(process.wait)
            stack.callback(process.terminate)
            _wait_for(port, log)
        yield [f"127.0.0.1:{port}" for port in ports], [*options, "-o", "LogLevel=ERROR"]


def _wait_for(port: int, log: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
