"""Rows to predict, which may have no targets: a part of data that is read without them."""

from collections.abc import Mapping
from typing import Any

from dtrain import secrets
from dtrain.config.facts import about
from dtrain.errors import PreflightError, WordsError
from dtrain.files import records
from dtrain.files.rowfile import SUFFIXES, columns_of, reader_of
from dtrain.storage.caching import folder


def targetless(part: Mapping[str, Any], *, task: str | None, trained: Mapping[str, Any]) -> dict[str, Any]:
    """`part` without its targets if its files have none, or if an objective of this `task` and no transform need them.
    Where no inputs are named they are the columns that the run was `trained` on. Raises PreflightError, StoreError and
    WordsError.
    """
    format, unread = about(part).get("files"), task in ("classification", "regression")
    if format == "images" and unread:
        return {**part, "label": part["label"] if _has_classes(part) else None, "holdout_path": None}
    if format not in SUFFIXES or task == "next_token" or part.get("packing") == "pack" or part.get("shift"):
        return {**part}
    target, inputs = part["targets"], part["inputs"]
    listed = [inputs] if isinstance(inputs, str) else [*(inputs or ())]
    if (not unread or part.get("transform") or target in listed) and target in columns_beside(part, None):
        return {**part}
    inputs = as_trained(part, trained)["inputs"]
    return {**part, "inputs": columns_beside(part, target) if inputs is None else inputs, "targets": None}


def as_trained(part: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """`part` with the columns that a run was `trained` on as its inputs, where both name none."""
    both = [about(each).get("files") in SUFFIXES and each.get("inputs", "") is None for each in (part, trained)]
    if not all(both) or part["targets"] != trained["targets"]:
        return {**part}
    return {**part, "inputs": columns_beside(trained, part["targets"])}


def _has_classes(part: Mapping[str, Any]) -> bool:
    """Whether images have a class each: they lie in class folders, or a table has them."""
    try:
        records.opened("images", part["path"], folder(part["cache"]), image=part["image"], label=part["label"])
    except (PreflightError, WordsError):
        return False
    return True


def columns_beside(part: Mapping[str, Any], target: str | None) -> list[str]:
    """The columns of the first file of a part beside its target."""
    path = secrets.opened(part["path"])
    reader = reader_of(part, path, about(part)["files"])
    (url, *_) = reader.found(path)
    if target is None:
        return reader.names(url)
    return [name for name in columns_of(reader, url, part) if name != target]
