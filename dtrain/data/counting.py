"""The process that opens data to count its samples, for `epochs=`: code and files of others may load torch, start
threads, print.

    python -m dtrain.data.counting    # a part of data as JSON in, its number of samples as JSON out
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.build import build, trusting
from dtrain.data.stream import as_source
from dtrain.errors import DtrainError, first_line
from dtrain.storage import hub, options

PARENT_DEATH = 1  # PR_SET_PDEATHSIG of prctl


def main() -> None:
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
    out = os.dup(1)
    os.dup2(2, 1)  # whatever the data prints
    answer = counted(**json.loads(sys.stdin.buffer.read()))
    os.write(out, json.dumps({**answer, "offline": hub.is_offline()}).encode())


def counted(part: Mapping[str, Any], trust: Sequence[str], storage: str) -> dict[str, Any]:
    """`samples`, or the `error` why there is no number of them."""
    options.take_over(storage)
    try:
        with trusting(trust):
            return {"samples": len(as_source(build(part)))}
    except DtrainError as error:
        return {"error": str(error)}
    except Exception as error:  # of code of the user's own
        return {"error": f"{part['_target_']} fails ({type(error).__name__}: {first_line(error)})."}


if __name__ == "__main__":
    main()
