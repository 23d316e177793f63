"""Rows of datasets of the hub in the cache of Hugging Face's datasets, where load_dataset puts them as Arrow files:

<cache>/<owner>___<name>/<config>/<version>/<hash>/<name>-<split>[-00000-of-00002].arrow
"""

import json
import os
import re
from pathlib import Path

from dtrain.config import home
from dtrain.errors import PreflightError, WordsError, nearest
from dtrain.storage import store

NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
INFO = "dataset_info.json"


def is_name(path: str) -> bool:
    """Whether it is that of a dataset of the hub, and no folder here."""
    return bool(NAME.fullmatch(path)) and store.is_local(path) and not store.local_path(path).exists()


def prepared(path: str) -> Path | None:
    """The folder with the Arrow files of a dataset: that of a name, or the path itself; None if there is none. Raises
    WordsError if a name has several.
    """
    if not is_name(path):
        if not store.is_local(path):
            return None
        folder = store.local_path(path)
        return folder if (folder / INFO).is_file() and not (folder / "state.json").exists() else None
    place = root() / folder_of(path)
    infos = sorted(place.glob(f"*/*/*/{INFO}"), key=lambda info: info.stat().st_mtime)
    configs = sorted({info.relative_to(place).parts[0] for info in infos})
    if len(configs) > 1:
        raise WordsError(
            f"data.path={path}: the cache has several configurations, {', '.join(configs)}. Type data.path=<the folder "
            f"with {INFO} of one>, such as data.path={infos[-1].parent}."
        )
    return infos[-1].parent if infos else None


def files(folder: Path, split: str | None) -> list[str]:
    """The Arrow files of a split. Raises PreflightError, and WordsError for the split."""
    try:
        splits = [*json.loads((folder / INFO).read_text("utf-8"))["splits"]]
    except (OSError, ValueError, TypeError, KeyError):
        raise PreflightError(f"data.path: {folder / INFO} cannot be read. Load the dataset again.") from None
    if split is None and len(splits) > 1:
        raise WordsError(f"data.path={folder} has the splits {', '.join(splits)}. Type data.split=<one of them>.")
    if split is not None and split not in splits:
        raise WordsError(f"data.split={split}: {folder} has no such split.{nearest(split, splits)}")
    name = re.escape(split or splits[0])
    found = sorted(file for file in folder.iterdir() if re.fullmatch(rf".*-{name}(-\d+-of-\d+)?\.arrow", file.name))
    whole = re.search(r"-of-(\d+)\.arrow$", found[0].name) if found else None
    if not found or len(found) != (int(whole[1]) if whole else 1):
        raise PreflightError(f"data.path: {folder} lacks files of the split {split or splits[0]}. Load it again.")
    return [str(file) for file in found]


def missing(path: str) -> str:
    """A sentence about a name of which there is nothing in the cache."""
    return (
        f'data.path={path}: no folder is there, and {root()} has no such dataset of the hub. Type python -c "from '
        f"datasets import load_dataset; load_dataset('{path}')\" where there is a network, or save_to_disk."
    )


def root() -> Path:
    """The cache of the package datasets."""
    folder = os.environ.get("HF_HOME") or home.cache() / "huggingface"
    return home.expanded(os.environ.get("HF_DATASETS_CACHE") or Path(folder) / "datasets")


def folder_of(name: str) -> str:
    """As the package calls the folder of a dataset: its name in snake case."""
    *owner, last = name.split("/")
    last = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", last)
    last = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", last).lower()
    return "___".join([*owner, last])
