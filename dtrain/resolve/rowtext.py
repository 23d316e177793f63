"""`data.tokenizer`, which makes tokens of the text in files of rows: their padding is its own."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dtrain import secrets
from dtrain.cluster import Cluster
from dtrain.config.facts import about
from dtrain.config.schema import Config
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.resolve.unknown import UNKNOWN

ROWS = ("csv", "jsonl", "parquet", "hf")


def padded(config: Config) -> tuple[Config, list[str]]:
    """The config with `data.pad` of the tokenizer; and the problems with the words of such rows."""
    data: Any = config.data
    if data is UNKNOWN or about(data).get("files") not in ROWS or not data.get("tokenizer"):
        return config, []
    name, inputs, word = data["tokenizer"], data["inputs"], f"data.tokenizer={data['tokenizer']}"
    problems = list[str]()
    if not isinstance(inputs, str):
        problems.append(f"{word} reads one column of text. Type data.inputs=<its name>.")
    if data.get("packing") == "pack" or data.get("shift"):
        problems.append(
            f"{word} is for rows with a class or number each. To train on all tokens of a text type data=text "
            "data.path=<the files> data.column=<the column>."
        )
    length, most = data["length"], data["sequence"]
    if length is not None and most is not None and most > length:
        problems.append(f"data.sequence={most} is longer than data.length={length}, to which rows are padded.")
    if problems or data["pad"] is not None:
        return config, problems
    from dtrain.chat import rowtext  # numpy

    try:
        return replace(config, data={**data, "pad": rowtext.padding(name)}), []
    except (PreflightError, StoreError) as error:
        return config, [str(error), *_column(data)]


def model(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check that the model reads text and gives one answer for each row."""
    data, part = config.data, config.model
    if about(data).get("files") not in ROWS or not data.get("tokenizer"):
        return
    takes, task = about(part).get("takes"), part.get("task")
    rows = f"data.tokenizer={data['tokenizer']} gives rows of text with one target each"
    if takes:
        answers = "gives an answer for each token" if takes == "tokens" else f"takes {takes}"
        yield (
            f"model={config.word('model')} {answers}, and {rows}. Type model=hf model.name=<a model of transformers> "
            "model.task=classification, or a model of your own, model._target_=<it>."
        )
    elif "reads" in about(part) and task != "classification":
        yield f"model.task={task} is not for rows with one answer, and {rows}. Type model.task=classification."


def _column(data: Any) -> list[str]:
    """The problem with the column of text, as far as the first of local files tells."""
    from dtrain.files import rowfile, rowindex
    from dtrain.storage import store

    try:
        path = secrets.opened(data["path"])
        reader = rowfile.reader_of(data, path, about(data)["files"])
        url = reader.found(path)[0]
        if store.is_local(url):
            rowindex.column(data["inputs"], reader.names(url), f"data.path={url}")
    except (PreflightError, StoreError):  # told where the files are read
        return []
    except WordsError as error:
        return [*error.problems]
    return []
