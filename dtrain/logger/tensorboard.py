"""TensorBoard event files under <out>/tensorboard; on remote storage they are written beside and put there every few seconds."""

import shutil
import time
from collections.abc import Mapping
from typing import Any

from dtrain import store

PUT_SECONDS = 15.0


class TensorBoard:
    """Writes events without torch.utils.tensorboard, whose import costs as much as torch's own."""

    def __init__(self, *, out: str, steps: int) -> None:
        self._url = store.join(out, "tensorboard")
        self._scratch = None if store.is_local(self._url) else store.scratch("tensorboard")
        self._folder = store.local_path(self._url) if self._scratch is None else self._scratch
        self._writer: Any = None
        self._put = time.monotonic()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._folder))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items() if isinstance(value, int | float)]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        if self._scratch is not None and time.monotonic() - self._put > PUT_SECONDS:
            self._writer.flush()
            self._upload()

    def note(self, text: str) -> None:
        return

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._upload()
        if self._scratch is not None:
            shutil.rmtree(self._scratch)

    def _upload(self) -> None:
        """Put what was written; nothing to do on a local disk."""
        if self._scratch is not None:
            for file in self._scratch.iterdir():
                store.upload(file, store.join(self._url, file.name))
        self._put = time.monotonic()
