"""The driver of a run's barrier jobs, as a process of its own beside the command, with the JVM as its child.

    python -m dtrain.integrations.spark <descriptor for events>

Standard input has the settings as a line of JSON, then a line for each job; its end is that of the driver.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from dtrain.integrations.spark.driver import Jobs, reason, write

TAIL = 4000
"""Bytes of Spark's log in which the reason is looked for if no session can be opened."""
NO_MASTER = (
    "no master is named. Type launcher.master=spark://<host>:7077 (yarn, k8s://<host>), or set spark.master in "
    "spark-defaults.conf."
)


def main(events: int) -> None:
    """Serve the command until it closes the standard input."""
    outputs = {number: os.dup(number) for number in (1, 2)}
    log = tempfile.TemporaryFile()  # noqa: SIM115 - what Spark writes, until this process ends
    for number in outputs:
        os.dup2(log.fileno(), number)
    lock = threading.Lock()

    def tell(*, output: bytes = b"", to: int = 0, **event: Any) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            if to:
                write(outputs[to], output)
            else:
                os.write(events, json.dumps(event).encode() + b"\n")

    asked = json.loads(sys.stdin.readline())
    try:
        context = session(asked["conf"])
    except Exception as error:
        log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
        said = log.read().decode(errors="replace")
        return tell(problems=[f"no session can be opened: {reason(f'{said}{chr(10)}{error}', 0)}"])
    jobs = Jobs(context, asked["host"], asked["folder"], tell)
    try:
        if context.master.startswith("local") and not asked["conf"].get("spark.master"):
            return tell(problems=[NO_MASTER])
        if problems := jobs.look(*asked["nodes"]):
            return tell(problems=problems)
        tell(ready=True)
        for line in sys.stdin:
            jobs.start(**json.loads(line))
    finally:
        jobs.stop()
        java = context._gateway
        context.stop()
        java.shutdown()
        java.proc.stdin.close()
        java.proc.wait()


def session(conf: Mapping[str, str]) -> Any:
    """A context of Spark with these settings, before those of spark-defaults.conf."""
    from pyspark import SparkConf, SparkContext

    return SparkContext(conf=SparkConf().setAll([*conf.items()]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
