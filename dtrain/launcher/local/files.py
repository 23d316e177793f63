"""The files that the ranks of a node write in a round, on their way to the server on another host."""

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path

from dtrain.config.structure import fault
from dtrain.result import SHAPE as RESULT
from dtrain.storage import store

FILE = re.compile(r"[\w-]+(\.[\w-]+)*")
"""The name of a file that a rank writes."""


def pack(folder: Path) -> dict[str, str]:
    """The files of a folder, as text for JSON."""
    return {path.name: base64.b64encode(path.read_bytes()).decode() for path in folder.iterdir() if path.is_file()}


def unpack(files: Mapping[str, object], folder: Path) -> None:
    """Write the files that `pack` returned on another host. Raises ConnectionError for anything else."""
    for name, data in files.items():
        if not FILE.fullmatch(name) or not isinstance(data, str):
            raise ConnectionError(f"it sent a file {name!r}, which no rank leaves")
        try:
            content = base64.b64decode(data, validate=True)
            facts = json.loads(content or "{}") if name.endswith(".json") else {}
        except (ValueError, RecursionError) as error:
            raise ConnectionError(f"it sent a file {name} that is cut or changed") from error
        if problem := fault(facts, RESULT if name == "result.json" else {}):
            raise ConnectionError(f"it sent a file {name} of which {problem}")
        store.write(str(folder / name), content)
