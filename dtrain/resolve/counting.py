"""How many samples there are to train on, and what says so: the words, a class, the index of files, or else the data
itself, which a process of its own opens, as the one that decides loads no torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dtrain import secrets
from dtrain.build import GIVEN, build
from dtrain.config.facts import about
from dtrain.errors import PreflightError, WordsError, first_line
from dtrain.resolve.declared import dataset
from dtrain.storage import hub, options

OPENING = (sys.executable, "-P", "-m", "dtrain.data.counting")


class Count(NamedTuple):
    """Samples to train on, without those held out, and what says how many there are."""

    samples: int
    where: str


def count(part: Mapping[str, Any], trust: Sequence[str]) -> Count:
    """Count the samples of a part of data. Raises WordsError, PreflightError and StoreError if that is not possible."""
    facts, own = about(part), part.get("dataset")
    stated = part.get(str(facts.get("length")))
    if isinstance(stated, int):
        return Count(stated, f"data.{facts['length']}")
    if name := facts.get("parts"):
        each = {source: count(of, trust) for source, of in part[name].items()}
        told = ", ".join(f"{source} {one.samples}" for source, one in each.items())
        return Count(sum(one.samples for one in each.values()), f"all sources: {told}")
    if facts.get("replayed"):
        raise PreflightError("a stream has no index, so nobody knows its samples before it ends.")
    own = own if isinstance(own, Mapping) else {}
    if samples := dataset(own).get("samples"):
        return Count(_trained(part, samples), f"about of {own['_target_']}")
    if own.get("_target_") == GIVEN:
        return Count(_trained(part, _length_of(build(own))), f"len of {own['of'].partition('.')[2]}")
    return _counted(json.dumps([part, list(trust), str(Path.cwd()), secrets.opened(part.get("path"))]))


def forget() -> None:
    """Count anew: files may have changed since."""
    _counted.cache_clear()


@lru_cache(64)
def _counted(asked: str) -> Count:
    """The count of a part that is neither made of others nor an object of this process."""
    part, trust, _, path = json.loads(asked)
    rows = _rows({**part, "path": path}) if str(part["_target_"]).startswith("dtrain.data.") else None
    if rows is not None:
        first, *others = [path] if isinstance(path, str) else path
        return Count(_trained(part, rows), f"rows of {first}" + f" and {len(others)} more" * bool(others))
    from dtrain.files import rowindex  # numpy, as below

    with rowindex.telling("epochs: the samples of the training data are counted; it takes a while"):
        return Count(_opened(part, trust), "len of the data, which was opened")


def _rows(part: Mapping[str, Any]) -> int | None:
    """The rows or images of files, by their index; None if a row is not a sample, or the data has no such index."""
    format, packed = about(part).get("files"), part.get("packing") == "pack"
    if format == "chat":
        from dtrain.chat import files

        return files.rows(part)
    from dtrain.files import records, rowfile
    from dtrain.storage import caching

    if format in ("images", "webdataset"):
        of = {"image": part["image"], "label": part["label"]}
        return len(records.opened(format, part["path"], caching.folder(part.get("cache")), **of))
    if format not in rowfile.SUFFIXES or packed:
        return None
    reader = rowfile.reader_of(part, part["path"], format)
    urls = reader.found(part["path"])
    opened = reader.opened(urls, rowfile.columns_of(reader, urls[0], part))
    return sum(sum(file.facts["sizes"]) for file in opened)


def _trained(part: Mapping[str, Any], whole: int) -> int:
    """Samples of `whole` that are not held out, as the data itself divides them."""
    holdout = part.get("holdout")
    apart = part.get("holdout_dataset") is not None or part.get("holdout_path") is not None
    if apart or not isinstance(holdout, int | float) or not holdout or whole < 1:
        return whole
    return whole - min(max(1, round(whole * holdout)), whole - 1)


def _length_of(given: Any) -> int:
    """The length of an object that was passed to `dtrain.run`. Raises PreflightError."""
    try:
        return len(given)
    except Exception as error:  # of the user's own code
        stream = " For a stream type data=stream data.stream._target_=<a function that returns it>."
        more = stream * hasattr(given, "__iter__")
        raise PreflightError(f"{type(given).__name__} has no length ({first_line(error)}).{more}") from error


def _opened(part: Mapping[str, Any], trust: Sequence[str]) -> int:
    """The length of the data, which another process builds. Raises WordsError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    request = json.dumps({"part": part, "trust": trust, "storage": options.hand_over()})
    try:
        done = subprocess.run(OPENING, input=request.encode(), stdout=subprocess.PIPE, env=environment, check=False)
        answer = json.loads(done.stdout)
    except (OSError, ValueError) as error:
        raise PreflightError(f"the process that opens the data ended: {first_line(error)}.") from error
    if answer["offline"]:
        hub.stay_offline()
    if "error" in answer:
        raise WordsError(secrets.masked(answer["error"]))
    return int(answer["samples"])
