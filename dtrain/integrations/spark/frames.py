"""Training on a DataFrame of Spark, and prediction with what was trained.

from dtrain.integrations.spark.frames import Fitted, fit
model = fit(df, "model=mlp", "steps=1000", features=["age", "income"], label="bought", out="/shared/run")
model.transform(df).show()
model.save("/shared/model"); Fitted.load("/shared/model")
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain import api
from dtrain.build import build, locate, trusting
from dtrain.compose import value_of
from dtrain.config.facts import about
from dtrain.config.word import text
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.integrations.spark.driver import reason
from dtrain.launcher import preflight
from dtrain.launcher.run import finished
from dtrain.planned import Plan
from dtrain.storage import lease, store

try:
    import pandas as pd  # type: ignore[import-untyped] # its stubs are another package
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException
    from pyspark.ml import Transformer
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.ml.param import Param, Params, TypeConverters
    from pyspark.ml.param.shared import HasPredictionCol
    from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
    from pyspark.sql import functions as F
    from pyspark.sql.functions import pandas_udf  # type: ignore[attr-defined] # it does not say that it exports it
    from pyspark.sql.types import ArrayType, BooleanType, IntegralType, NumericType
except ImportError as error:
    raise PreflightError(f"dtrain.integrations.spark.frames: {error}. Type: pip install 'dtrain[spark]'") from None

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from torch import nn

ROWS, ROWS_FACTS, WEIGHTS = "rows", "rows.json", "model.safetensors"
HADOOP = {"s3": "s3a", "gcs": "gs", "file": "file"}
"""Protocol of a URL -> that of Hadoop, where the two differ."""
DIGEST = "decimal(38,0)"


def fit(
    df: "DataFrame", *words: str, features: str | Sequence[str] = "features", label: str = "label", out: str,
    prediction: str = "prediction",
) -> "Fitted":  # fmt: skip
    """Train on the rows of `df` as `dtrain.run(*words, out=out)` does, and return what predicts the column
    `prediction`. `features`: a column of vectors or arrays, or columns of numbers. `label`: numbers (whole ones or
    booleans mean classification) or arrays.

    The rows are written to <out>/rows once, in the order of their partitions. The same call again goes on, and needs
    the same rows. Errors as for `dtrain.run`.
    """
    names = [features] if isinstance(features, str) else [*features]
    rows = _chosen(df, names, label, value_of(words, "objective"))
    is_whole = isinstance(rows.schema["label"].dataType, IntegralType | BooleanType)
    chosen = [] if value_of(words, "objective") else [f"objective={'classification' if is_whole else 'regression'}"]
    root = str(Path(out).absolute()) if store.is_local(out) else out
    path = store.join(root, ROWS)
    data = ("data=spark", f"data.path={text(path)}", "data.features=features", "data.label=label")
    plan = _judged([*chosen, *words, *data], out)
    with store.anchored(), lease.hold(plan.out):
        _write(rows, root, out)
    api.run(*chosen, *words, *data, out=out)
    return _fitted(plan, names, prediction)


def _judged(words: Sequence[str], out: str) -> Plan:
    """The plan of a run whose rows are not written yet. Raises WordsError and PreflightError as `dtrain.run` does."""
    plan = api.plan(*words, out=out)
    if not finished(plan):
        with trusting(plan.trust):
            build(plan.launcher).describe(plan)
        preflight.check(replace(plan, data={**plan.data, "path": None}))
    return plan


def _chosen(df: "DataFrame", features: Sequence[str], label: str, objective: str | None) -> "DataFrame":
    """The columns `features` and `label`."""
    if not features:
        raise WordsError(f"fit: features=[] names no column. The DataFrame has {', '.join(df.columns)}.")
    if absent := [name for name in (*features, label) if name not in df.columns]:
        raise WordsError(f"fit: the DataFrame has no column {absent[0]}. Its columns: {', '.join(df.columns)}.")
    target, kind = F.col(f"`{label}`"), df.schema[label].dataType
    if isinstance(kind, VectorUDT):
        target = vector_to_array(target, "float32")
    elif objective == "classification" and isinstance(kind, NumericType | BooleanType):
        target = target.cast("bigint")
    elif objective == "regression" and isinstance(kind, NumericType | BooleanType):
        target = target.cast("float")
    return df.select(_array(df, features).alias("features"), target.alias("label"))


def _array(df: "DataFrame", features: Sequence[str]) -> "Column":
    """The features as one column of arrays."""
    columns = [F.col(f"`{name}`") for name in features]
    kinds = [df.schema[name].dataType for name in features]
    if len(columns) == 1 and isinstance(kinds[0], VectorUDT):
        return vector_to_array(columns[0], "float32")
    if len(columns) == 1 and isinstance(kinds[0], ArrayType):
        return columns[0]
    return F.array(*(column.cast("float") for column in columns))


def _write(rows: "DataFrame", root: str, out: str) -> None:
    """Write the rows below `root`, unless they are there already. Raises WordsError if those are others, and StoreError
    if Spark cannot.
    """
    path, facts = store.join(root, ROWS), store.join(root, ROWS_FACTS)
    if store.exists(facts):
        there, here = json.loads(store.read(facts)), _digest(rows)
        if there != here:
            raise WordsError(
                f"out={out} has {there['rows']} rows of another DataFrame (this one has {here['rows']}, or other "
                f"values). Type another out, or remove it to begin again."
            )
        return
    protocol, mark, rest = path.partition("://")
    place = f"{HADOOP.get(protocol, protocol)}://{rest}" if mark else f"file://{path}"
    hint = "Type an out that this host and the workers share, or a URL that Spark can write to"
    try:
        rows.write.mode("overwrite").parquet(place)
        digest = _digest(rows.sparkSession.read.parquet(place))
    except (Py4JError, PySparkException) as error:
        raise StoreError.during(
            "have Spark write the rows to", path, reason(str(error), 0).rstrip("."), hint
        ) from error
    if not any(url.endswith(".parquet") for url in store.find(path)):
        raise StoreError.during("find the rows that Spark wrote to", path, "they are on the workers' disks", hint)
    store.publish(facts, json.dumps(digest).encode())


def _digest(rows: "DataFrame") -> dict[str, Any]:
    """The number of rows and a sum of their hashes, whatever their order."""
    counted = rows.agg(F.count("*"), F.sum(F.xxhash64("features", "label").cast(DIGEST))).first()
    assert counted is not None
    return {"rows": counted[0], "sum": str(counted[1])}


def _fitted(plan: Plan, features: Sequence[str], prediction: str) -> "Fitted":
    """The newest weights of the run."""
    from safetensors.torch import save_model

    with trusting(plan.trust):
        facts = build(plan.data).facts
        model = api.load(plan.out)
    part = {name: facts[name] if value == "auto" else value for name, value in plan.model.items() if name != "_about_"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, WEIGHTS)
        save_model(model, str(file))
        weights = file.read_bytes()
    classes = about(plan.objective).get("task") == "classification"
    card = {"model": part, "seed": plan.seed, "kind": "class" if classes else "number"}
    if not classes and facts.get("outputs", 1) > 1:
        card["kind"] = "array"
    fitted = Fitted(card=card, weights=weights, trust=plan.trust)
    return fitted.setFeatures([*features]).setPrediction(prediction)


class Fitted(Transformer, HasPredictionCol, MLWritable, MLReadable["Fitted"]):
    """A trained model as a Transformer: a column with the class, the number or the array that it predicts. `trust`: the
    packages whose code may run, beside dtrain and torch; it is not saved.
    """

    features: Param[Sequence[str]] = Param(
        Params._dummy(), "features", "columns of the inputs", typeConverter=TypeConverters.toListString
    )

    def __init__(self, *, card: Mapping[str, Any], weights: bytes, trust: Sequence[str] = ()) -> None:
        super().__init__()
        self.card, self.weights, self.trust = dict(card), weights, [*trust]

    def setFeatures(self, value: Sequence[str]) -> "Fitted":  # noqa: N802 - as Spark's own setters
        return self._set(features=[*value])

    def setPrediction(self, value: str) -> "Fitted":  # noqa: N802
        return self._set(predictionCol=value)

    def module(self) -> "nn.Module":
        """The model itself, on the CPU, in evaluation mode. Raises WordsError for code that is not trusted."""
        return _module(self.card, self.weights, self.trust)

    def _transform(self, dataset: "DataFrame") -> "DataFrame":
        with trusting(self.trust):
            locate(str(self.card["model"]["_target_"]))
        card, trust = self.card, self.trust
        weights = dataset.sparkSession.sparkContext.broadcast(self.weights)
        kind = {"class": "double", "number": "double", "array": "array<double>"}[card["kind"]]

        @pandas_udf(kind)  # type: ignore[untyped-decorator] # it has none
        def predict(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
            return predictions(batches, card, weights.value, trust)

        features = _array(dataset, self.getOrDefault(self.features))
        return dataset.withColumn(self.getPredictionCol(), predict(features))

    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    def read(cls) -> "_Reader":
        return _Reader()


class _Writer(MLWriter):
    def __init__(self, instance: Fitted) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802
        """Weights as safetensors, all else as Spark's own metadata: JSON."""
        more = {"card": self._instance.card}
        DefaultParamsWriter.saveMetadata(self._instance, path, self.sparkSession, extraMetadata=more)
        store.write(store.join(path, WEIGHTS), self._instance.weights)


class _Reader(MLReader[Fitted]):
    def load(self, path: str) -> Fitted:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession, "dtrain.integrations.spark.frames.Fitted")
        fitted = Fitted(card=metadata["card"], weights=store.read(store.join(path, WEIGHTS)))
        fitted._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(fitted, metadata)
        return fitted


def predictions(
    batches: Iterable[pd.Series], card: Mapping[str, Any], weights: bytes, trust: Sequence[str]
) -> Iterator[pd.Series]:
    """The predictions for batches of features, on an executor."""
    import numpy as np
    import torch

    model = _module(card, weights, trust)
    for batch in batches:
        rows = np.stack([np.asarray(row) for row in batch]) if len(batch) else np.empty((0, 1))
        if not len(rows):
            yield pd.Series([], dtype="float64")
            continue
        whole = np.issubdtype(rows.dtype, np.integer)
        with torch.no_grad():
            outputs = model(torch.from_numpy(rows.astype(np.int64 if whole else np.float32)))
        outputs = getattr(outputs, "logits", outputs)
        if card["kind"] == "class":
            yield pd.Series(outputs.argmax(1).double().numpy())
        elif card["kind"] == "number":
            yield pd.Series(outputs.reshape(len(rows)).double().numpy())
        else:
            yield pd.Series([*outputs.double().numpy()])


def _module(card: Mapping[str, Any], weights: bytes, trust: Sequence[str]) -> "nn.Module":
    import torch
    from safetensors.torch import load_model

    from dtrain.model import construct
    from dtrain.parallel.order import materialize

    with trusting(trust):
        model = construct(card["model"], facts={}, seed=card["seed"])
    if any(parameter.is_meta for parameter in model.parameters()):
        materialize(model, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, WEIGHTS)
        file.write_bytes(weights)
        load_model(model, file)
    model.eval()
    return model
