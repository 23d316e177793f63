"""A standalone cluster of Spark on this host, under a folder of the test: a master and two workers.

with spark(folder) as (master, variables):
    subprocess.run([..., f"launcher.master={master}"], env={**os.environ, **variables})
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from servers import free_port

CORES = 4
"""Of each worker, on a host that may have fewer."""
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of Java: it compiles less, which pays for programs that live for seconds."""
SMALL = {"spark.executor.memory": "512m", "spark.driver.memory": "512m", "spark.ui.enabled": "false"}
CONF = "{" + ", ".join(f"{name}: '{value}'" for name, value in SMALL.items()) + "}"


def variables(folder: Path) -> dict[str, str]:
    """Those of daemons and commands: loopback alone, no configuration of this host."""
    tests, conf, local = Path(__file__).parent, folder / "conf", folder / "local"
    conf.mkdir(exist_ok=True)
    local.mkdir(exist_ok=True)
    return {
        "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_CONF_DIR": str(conf), "SPARK_LOCAL_DIRS": str(local),
        "SPARK_DAEMON_MEMORY": "256m", "JDK_JAVA_OPTIONS": f"{QUICK} -Djava.io.tmpdir={local}",
        "PYTHONPATH": f"{tests.parent}:{tests}", "PYSPARK_PYTHON": sys.executable,
    }  # fmt: skip


def skip_without() -> None:
    missing = [name for name in ("pyspark", "pyarrow", "pandas") if not find_spec(name)]
    if missing:
        pytest.skip(f"{missing} is not here. Type: pip install 'dtrain[spark]'")
    if not shutil.which("java"):
        pytest.skip("java is not here. Type: apt-get install openjdk-17-jre-headless")


@contextmanager
def spark(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of the master, and the variables of a command that uses it; all ends with the context."""
    skip_without()
    environment = variables(folder)
    port, log = free_port(), folder / "master.log"
    with ExitStack() as stack:
        master = ("master.Master", "-h", "127.0.0.1", "-p", str(port), "--webui-port", "0")
        stack.enter_context(_daemon(log, environment, *master))
        _wait_for(log, "Successfully started service 'sparkMaster'", 1)
        for name in ("w1", "w2"):
            options = ("-h", "127.0.0.1", "-c", str(CORES), "-m", "1g", "-d", str(folder / name), "--webui-port", "0")
            worker = ("worker.Worker", *options, f"spark://127.0.0.1:{port}")
            stack.enter_context(_daemon(folder / f"{name}.log", environment, *worker))
        _wait_for(log, "Registering worker", 2)
        yield f"spark://127.0.0.1:{port}", environment


@contextmanager
def _daemon(log: Path, environment: dict[str, str], name: str, *options: str) -> Iterator[None]:
    found = find_spec("pyspark")
    assert found and found.origin
    command = [str(Path(found.origin).parent / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(log: Path, text: str, times: int, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while log.read_text().count(text) < times:
        assert time.monotonic() < deadline, f"Spark is not ready after {seconds:.0f} s:\n{log.read_text()[-2000:]}"
        time.sleep(0.1)
