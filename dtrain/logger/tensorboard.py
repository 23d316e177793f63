"""TensorBoard event files under <out>/tensorboard; on remote storage they are written locally and uploaded every few
seconds.
"""

import os
import shutil
import time
from collections.abc import Mapping
from typing import Any

from dtrain.config import environment
from dtrain.logger import Facts, Logger
from dtrain.result import OF_THE_MACHINE
from dtrain.storage import store

PUT_SECONDS = 15.0


def preload() -> None:
    """Import what the first row will need, in a process that others are forked from."""
    import tensorboard.plugins.hparams.metadata
    import tensorboard.summary.writer.event_file_writer  # noqa: F401


class TensorBoard(Logger):
    """Scalars as `train/`, `eval/` and `speed/`, notes as text, the settings as hparams.

    Without torch.utils.tensorboard, whose import costs as much as torch's own.
    """

    def __init__(self, *, out: str, steps: int) -> None:
        self._url = store.join(out, "tensorboard")
        there = os.environ.get(environment.REPORTS)
        self._scratch = None if store.is_local(self._url) else store.scratch("tensorboard", inside=there)
        self._folder = store.local_path(self._url) if self._scratch is None else self._scratch
        self._writer: Any = None
        self._put = time.monotonic()
        self._facts: Mapping[str, Any] = {}
        self._purged: int | None = None
        """The step from which on what earlier files hold is to be forgotten, until that is written."""
        self._notes: list[tuple[int, str]] = []
        """(step, text) from before the first row: the writer is imported with that."""

    def begin(self, facts: Facts) -> None:
        self._facts = facts.settings

    def back(self, step: int) -> None:
        self._purged = step + 1

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._write(step, *(Summary.Value(tag=tag(name), simple_value=value) for name, value in numbers.items()))
        self._write_notes()
        if self._scratch is not None and time.monotonic() - self._put > PUT_SECONDS:
            self._writer.flush()
            self._upload()

    def text(self, step: int, name: str, text: str) -> None:
        self._notes.append((step, text))
        if self._writer is not None:
            self._write_notes()

    def end(self, result: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()
            self._upload()
        if self._scratch is not None:
            shutil.rmtree(self._scratch)

    def _write_notes(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        for step, text in self._notes:
            # indented lines are verbatim in Markdown
            lines = "".join(f"    {line}\n" for line in text.strip("\n").splitlines())
            tensor = TensorProto(dtype=DT_STRING, string_val=[lines.encode()])
            self._write(step, Summary.Value(tag="notes", metadata=metadata, tensor=tensor))
        self._notes.clear()

    def _write(self, step: int, *values: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._folder))
            if self._facts:
                values = (_hparams(self._facts), *values)
        if self._purged is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=self._purged, session_log=start))
            self._purged = None
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _upload(self) -> None:
        """Upload the files; nothing to do on a local disk."""
        if self._scratch is not None:
            for file in self._scratch.iterdir():
                store.upload(file, store.join(self._url, file.name))
        self._put = time.monotonic()


def tag(name: str) -> str:
    """The tag of a scalar in TensorBoard."""
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"{'speed' if name in OF_THE_MACHINE else 'train'}/{name}"


def _hparams(facts: Mapping[str, Any]) -> Any:
    """The hyperparameters of this run for TensorBoard."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    start = SessionStartInfo()
    for key, value in facts.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = str(value)
    content = HParamsPluginData(session_start_info=start, version=metadata.PLUGIN_DATA_VERSION).SerializeToString()
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=content))
    return Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=plugin, tensor=metadata.NULL_TENSOR)
