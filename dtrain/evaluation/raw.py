"""Raw inputs as data to predict: texts, images, rows and tensors become what the words of a run read, so that its own
tokenizer, transform and size apply to them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.config.facts import about
from dtrain.errors import WordsError, an
from dtrain.planned import Part, Plan
from dtrain.storage import store
from dtrain.storage.rowfile import SUFFIXES

OBJECT = "predict.inputs"
"""The label of inputs that stay objects of this process."""
OF_ROWS = ("inputs", "targets", "pad", "length", "sequence", "tokenizer", "transform")
OF_IMAGES = ("size", "colors", "fit", "centre", "normalize")
OF_DATASET = ("inputs", "targets", "pad", "length", "transform", "collate")
"""Arguments of the run's data that its inputs depend on."""


def as_data(inputs: Iterable[Any], plan: Plan, folder: Path) -> tuple[Part, dict[str, Any]]:
    """(`predict.data` for these inputs, objects for `dtrain.build.given`); files are written to `folder`. Raises
    WordsError for inputs that the data of the run has none of.
    """
    data, listed = plan.data, list(inputs)
    files, task = about(data).get("files"), about(plan.objective).get("task")
    if task == "next_token":
        raise WordsError("dtrain.predictions: this run continues text. Type dtrain generate, or dtrain predict.")
    if not listed:
        raise WordsError("dtrain.predictions: there are no inputs. Give a list of at least one.")
    if files in ("images", "webdataset"):
        _write_images(listed, folder)
        return {"data": "images", "path": str(folder), **_same(data, OF_IMAGES)}, {}
    if files in SUFFIXES:
        rows = [json.dumps(_row(each, data)) for each in listed]
        (folder / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows), "utf-8")
        return {"data": "jsonl", "path": str(folder / "rows.jsonl"), **_same(data, OF_ROWS)}, {}
    given = {"_target_": "dtrain.build.given", "of": OBJECT}
    samples = [_sample(each, data) for each in listed]
    return {"data": "dataset", "dataset": given, **_same(data, OF_DATASET)}, {OBJECT: samples}


def _same(data: Part, names: Sequence[str]) -> dict[str, Any]:
    return {name: data[name] for name in names if data.get(name) is not None}


def _row(value: Any, data: Part) -> Mapping[str, Any]:
    """The columns of a row."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    inputs = data["inputs"]
    if isinstance(inputs, str):
        return {inputs: _plain(value)}
    plain = _plain(value)
    if isinstance(inputs, list | tuple) and isinstance(plain, list) and len(plain) == len(inputs):
        return dict(zip(inputs, plain, strict=True))
    raise WordsError(
        f"dtrain.predictions: a row of this run has several columns, and an input is {an(value)}. Give a dict."
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
        name = f"{number:09d}"
        if isinstance(image, str | Path):
            place = str(image)
            suffix = Path(place).suffix
            if store.is_local(place):
                (folder / f"{name}{suffix}").symlink_to(store.local_path(place).absolute())
            else:
                (folder / f"{name}{suffix}").write_bytes(store.read(place))
        elif isinstance(image, np.ndarray) or hasattr(image, "save"):
            _write(image, folder / f"{name}.png")
        else:
            raise WordsError(
                f"dtrain.predictions: an input is {an(image)}. Give paths, images of PIL, or arrays of bytes."
            )


def _write(image: Any, path: Path) -> None:
    from PIL import Image

    made = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    made.convert("RGB").save(path) if made.mode not in ("L", "RGB", "RGBA", "P", "I;16") else made.save(path)
