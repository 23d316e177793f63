"""A process that encodes groups of texts: `python -m dtrain.tokenizer.worker <socket> <file of the tokenizer>`, as
numbers of descriptors. It ends when the other end of its socket is closed.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import PreflightError, first_line
from dtrain.tokenizer import NotText, Vocabulary

DONE, ERROR = b"\0", b"\1"


def pack(parts: Sequence[bytes]) -> bytes:
    """Texts as one: their number, their sizes in bytes, and all of them."""
    return b"".join([np.array([len(parts), *map(len, parts)], np.int64).tobytes(), *parts])


def unpack(data: bytes) -> tuple[NDArray[np.int64], memoryview]:
    """The sizes of what is in the rest, and the rest."""
    count = int(np.frombuffer(data, np.int64, 1)[0])
    return np.frombuffer(data, np.int64, count, 8), memoryview(data)[8 * (1 + count) :]


def work(descriptor: int, file: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the process that it works for
    with suppress(EOFError, OSError), Connection(descriptor) as pipe:
        tokenizer = Vocabulary(os.pread(file, os.fstat(file).st_size, 0), "tokenizer")
        pipe.send_bytes(DONE)
        while True:
            sizes, texts = unpack(pipe.recv_bytes())
            ends = np.cumsum(sizes).tolist()
            pipe.send_bytes(_encoded(tokenizer, [bytes(texts[a:b]) for a, b in zip([0, *ends], ends, strict=False)]))


def _encoded(tokenizer: Vocabulary, texts: Sequence[bytes]) -> bytes:
    try:
        each = tokenizer.encode_all(texts)
    except NotText as error:
        return ERROR + f"text\n{error.number}\n{error.offset}\n{error.byte}".encode()
    except (PreflightError, MemoryError) as error:
        return ERROR + f"other\n{first_line(error)}".encode()
    lengths = np.array([len(each), *map(len, each)], np.int64)
    return b"".join([DONE, lengths.tobytes(), *(tokens.tobytes() for tokens in each)])


if __name__ == "__main__":
    work(*map(int, sys.argv[1:]))
