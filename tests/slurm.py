"""A Slurm cluster of two nodes on this host, under a folder of the test: munged, slurmctld and a slurmd for each node.

with slurm(folder) as variables:
    subprocess.run(["sbatch", ...], env={**os.environ, **variables})
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from servers import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
WHERE = f"{os.environ.get('PATH', '')}:/usr/sbin"
CONFIG = """
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
{nodes}
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=hi Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The variables of a command that sees the cluster; its jobs and daemons end with the context."""
    missing = [name for name in DAEMONS if not shutil.which(name, path=WHERE)]
    if missing or os.getuid() != 0:
        pytest.skip(f"{missing or 'root'} is not here. Type: apt-get install slurm-wlm munge, as root")
    nodes = "\n".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=4000"
        for name in ("n1", "n2")
    )
    for name in ("state", "spool_n1", "spool_n2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, port=free_port(), nodes=nodes))
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(128))
    files = [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log"]
    munged = ["munged", "-F", "--force", f"--key-file={key}", f"--seed-file={folder}/munge.seed", *files]
    environment = {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": WHERE}
    with ExitStack() as stack:
        stack.enter_context(_daemon(munged, environment))
        stack.enter_context(_daemon(["slurmctld", "-D", "-i"], environment))
        for name in ("n1", "n2"):
            stack.enter_context(_daemon(["slurmd", "-D", "-N", name], environment))
        _wait_until(lambda: _said(["sinfo", "-h", "-o", "%T"], environment) == {"idle"}, folder)
        try:
            yield environment
        finally:
            subprocess.run(["scancel", "--user", "root"], env=environment, timeout=60)
            _wait_until(lambda: not _said(["squeue", "-h"], environment), folder)


def _said(command: list[str], environment: dict[str, str]) -> set[str]:
    return set(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.split())


@contextmanager
def _daemon(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    command = [shutil.which(command[0], path=WHERE) or command[0], *command[1:]]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until(true: Callable[[], bool], folder: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        logs = "".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, f"Slurm is not ready after {seconds:.0f} s:\n{logs}"
        time.sleep(0.2)
