"""Raw inputs as data to predict: texts, images, rows and tensors become what the words of a run read, so that its own
tokenizer, transform and size apply to them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.build import GIVEN
from dtrain.config.facts import about
from dtrain.errors import PreflightError, StoreError, WordsError, an
from dtrain.files.imagefiles import MAGIC
from dtrain.files.rowfile import MASKS, SUFFIXES
from dtrain.files.targetless import columns_beside
from dtrain.planned import Part, Plan
from dtrain.storage import store

OBJECT = "predict.inputs"
"""The label of inputs that stay objects of this process."""
ROWS = "rows.jsonl"
OF_ROWS = ("inputs", "targets", "pad", "length", "sequence", "tokenizer", "transform")
OF_IMAGES = ("size", "colors", "fit", "centre", "normalize")
OF_DATASET = ("inputs", "targets", "pad", "length", "transform", "collate")
"""Arguments of the run's data that its inputs depend on."""


def as_data(inputs: Iterable[Any], plan: Plan, folder: Path) -> tuple[Part, dict[str, Any]]:
    """(`predict.data` for these inputs, objects for `dtrain.build.given`); files are written to `folder`. Raises
    WordsError for inputs that the data of the run has none of.
    """
    data = plan.data
    files, task = about(data).get("files"), about(plan.objective).get("task")
    if task == "next_token":
        raise WordsError("dtrain.predictions: this run continues text. Type dtrain generate, or dtrain predict.")
    _check_list(inputs, data)
    listed = list(inputs)
    if not listed:
        raise WordsError("dtrain.predictions: there are no inputs. Give a list of at least one.")
    if files in ("images", "webdataset"):
        _write_images(listed, folder)
        return {"data": "images", "path": str(folder), **_same(data, OF_IMAGES)}, {}
    if files in SUFFIXES:
        needed = _needed(data)
        rows = [json.dumps(_row(number, each, needed), default=str) for number, each in enumerate(listed)]
        (folder / ROWS).write_text("".join(f"{row}\n" for row in rows), "utf-8")
        return {"data": "jsonl", "path": str(folder / ROWS), **_same(data, OF_ROWS)}, {}
    given = {"_target_": GIVEN, "of": OBJECT}
    samples = [_sample(each, data) for each in listed]
    return {"data": "dataset", "dataset": given, **_same(data, OF_DATASET)}, {OBJECT: samples}


def _same(data: Part, names: Sequence[str]) -> dict[str, Any]:
    return {name: data[name] for name in names if data.get(name) is not None}


@contextmanager
def named(folder: Path) -> Iterator[None]:
    """A context in which errors about files of `as_data` in this folder are about the inputs, by their numbers."""
    row, place = re.compile(rf"{re.escape(str(folder / ROWS))}(?:[,:] line (\d+))?"), re.escape(f"{folder}/")

    def told(text: str) -> str:
        text = row.sub(lambda match: f"input {int(match[1]) - 1}" if match[1] else "the inputs", text)
        text = re.sub(rf"{place}(\d+)\.png", lambda match: f"input {int(match[1])}", text)
        return re.sub(r"^(predict\.)?data(\.path|\.dataset)?[:=] ?", "dtrain.predictions: ", text)

    try:
        yield
    except (WordsError, PreflightError) as error:
        if isinstance(error, StoreError) or not any(str(folder) in each for each in error.problems):
            raise
        raise type(error)(*map(told, error.problems)) from error


def _check_list(inputs: Any, data: Part) -> None:
    """Raises WordsError for what is one input, or a table, and no list of inputs."""
    if hasattr(inputs, "to_dict") and hasattr(inputs, "columns"):
        raise WordsError(
            f"dtrain.predictions: the inputs are {an(inputs)}. Give a list of rows: <the table>.to_dict('records')."
        )
    least = 4 if about(data).get("files") in ("images", "webdataset") else 2
    is_column = about(data).get("files") in SUFFIXES and isinstance(data["inputs"], str)
    is_one = getattr(inputs, "ndim", least) < (1 if is_column else least)
    if is_one or isinstance(inputs, str | bytes | Path | Mapping) or not isinstance(inputs, Iterable):
        raise WordsError(
            f"dtrain.predictions: the inputs are {an(inputs)}. Give a list, also of one: dtrain.predictions(run, "
            "[<the input>])."
        )


def _needed(data: Part) -> str | Sequence[str]:
    """The column of a row's input, or the columns that it needs."""
    inputs = data["inputs"]
    if isinstance(inputs, str):
        return inputs
    listed = columns_beside(data, data["targets"]) if inputs is None else inputs
    return [name for name in listed if data.get("pad") is None or name not in MASKS]


def _row(number: int, value: Any, needed: str | Sequence[str]) -> Mapping[str, Any]:
    """The columns of a row."""
    names = [needed] if isinstance(needed, str) else needed
    if isinstance(value, Mapping):
        if lacking := [name for name in names if name not in value]:
            raise WordsError(
                f"dtrain.predictions: input {number} lacks {', '.join(lacking)}. It has {', '.join(map(str, value))}."
            )
        return {name: _plain(each) for name, each in value.items()}
    plain = _plain(value)
    if isinstance(needed, str):
        return {needed: plain}
    if isinstance(plain, list | tuple) and len(plain) == len(names):
        return dict(zip(names, plain, strict=True))
    raise WordsError(
        f"dtrain.predictions: a row of this run has several columns ({', '.join(names)}), and input {number} is "
        f"{an(value)}. Give a dict."
    )


def _plain(value: Any) -> Any:
    """A value as JSON has it: of arrays and tensors their numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _sample(value: Any, data: Part) -> Any:
    """A sample of a map-style dataset, with a target that nothing reads."""
    inputs, target = data.get("inputs"), data.get("targets")
    if not isinstance(target, str):
        return value, 0
    return {**(value if isinstance(value, Mapping) else {str(inputs): value}), target: 0}


def _write_images(images: Sequence[Any], folder: Path) -> None:
    """Files of images, whose names are in the order of the inputs. Raises WordsError and StoreError."""
    for number, image in enumerate(images):
        path = folder / f"{number:09d}.png"  # whatever its format: that is read from its bytes
        if isinstance(image, str | Path):
            _place(number, str(image), path)
        elif isinstance(image, np.ndarray) or hasattr(image, "save"):
            _write(image, path)
        else:
            raise WordsError(
                f"dtrain.predictions: input {number} is {an(image)}. Give paths, images of PIL, or arrays of bytes."
            )


def _place(number: int, place: str, path: Path) -> None:
    """The file of an image at `path`. Raises WordsError if there is none, StoreError if it cannot be read."""
    is_local = store.is_local(place)
    local = store.local_path(place).absolute() if is_local else path
    wrong = "is a folder, and an input is one image" if is_local and local.is_dir() else ""
    if is_local and not local.exists():
        wrong = "is not there"
    if not wrong:
        if is_local:
            path.symlink_to(local)
        else:
            path.write_bytes(store.read(place))
        with path.open("rb") as file:
            wrong = "" if file.read(4).startswith(MAGIC) else "is no image"
    if wrong:
        raise WordsError(f"dtrain.predictions: input {number}, {place}, {wrong}. Give the paths of images.")


def _write(image: Any, path: Path) -> None:
    from PIL import Image

    made = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    made.convert("RGB").save(path) if made.mode not in ("L", "RGB", "RGBA", "P", "I;16") else made.save(path)
