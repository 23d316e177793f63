"""`dtrain.integrations.spark.frames.fit` on a real cluster: rows of uneven partitions give the weights of the same rows here, and what was
trained predicts, is saved without code and loaded.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from standalone import SMALL, skip_without, spark, variables

import dtrain

ROWS = """
import numpy as np
import torch
from torch.utils.data import TensorDataset


def values():
    random = np.random.default_rng(0)
    x = random.normal(size=(515, 3))
    return x, x @ [1.0, -2.0, 3.0]


def dataset():
    x, y = values()
    return TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(y).float())
"""
FIT = """
import json
import sys

import pyspark
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession

from dtrain.integrations.spark.frames import fit
from own_rows import values

master, words, conf = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
builder = SparkSession.builder.master(master)
for name, value in conf.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
x, y = values()
rows = [(*map(float, row), float(target)) for row, target in zip(x, y)]
parts = [rows[:257], rows[257:]]
df = spark.sparkContext.parallelize(range(2), 2).flatMap(lambda part: parts[part]).toDF(["a", "b", "c", "y"])
features = ["a", "b", "c"]
fitted = fit(df, *words, features=features, label="y", out="far")
again = fit(df, *words, features=features, label="y", out="far")
assert again.weights == fitted.weights
try:
    fit(df.limit(5), *words, features=features, label="y", out="far")
except dtrain.WordsError as error:
    print(error)
PipelineModel([fitted]).write().overwrite().save("saved")
loaded = PipelineModel.load("saved")
columns = [[row.prediction for row in model.transform(df).collect()] for model in (fitted, loaded)]
assert columns[0] == columns[1], "what was loaded predicts the same"
print("predictions", json.dumps(columns[0]))
spark.stop()
"""
WORDS = [
    "model=mlp",
    "strategy=ddp",
    "nodes=2",
    "devices=1",
    "steps=20",
    "batch=32",
    "logger=[]",
    "hook=[]",
    "data.holdout=0",
]


@pytest.mark.campaign("network")
@pytest.mark.parametrize("launcher", ["spark", "local"])
def test_uneven_partitions_give_the_weights_of_the_same_rows_here(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "it's here"
    place.mkdir()
    (place / "own_rows.py").write_text(ROWS)
    (place / "fit.py").write_text(FIT)
    (tmp_path / "cluster").mkdir()
    with spark(tmp_path / "cluster") as (master, variables):
        environment = {**os.environ, **variables, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        words = [*WORDS, f"launcher={launcher}", "launcher.address=127.0.0.1"]
        program = ["fit.py", master, json.dumps(words), json.dumps(SMALL)]
        done = commands.python(*program, cwd=place, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "far has 515 rows of another DataFrame (this one has 5" in done.stdout
    data = ["data=dataset", "data.dataset._target_=own_rows.dataset", "trust=[own_rows]", "objective=regression"]
    near = commands.run(*WORDS, *data, "launcher=local", "out=near", cwd=place)
    assert near.returncode == 0, near.stderr
    monkeypatch.syspath_prepend(place)
    far, here = dtrain.load(str(place / "far")), dtrain.load(str(place / "near"), "trust=[own_rows]")
    there, weights = far.state_dict(), here.state_dict()
    assert there.keys() == weights.keys() and all(torch.equal(there[name], weights[name]) for name in weights)
    x, _ = importlib.import_module("own_rows").values()
    monkeypatch.delitem(sys.modules, "own_rows")
    with torch.no_grad():
        expected = here(torch.from_numpy(x).float()).reshape(-1)
    line = next(line for line in done.stdout.splitlines() if line.startswith("predictions "))
    np.testing.assert_allclose(json.loads(line.partition(" ")[2]), expected.numpy(), rtol=1e-5, atol=1e-6)
    saved = [path.name for path in (place / "saved").rglob("*") if path.is_file() and path.suffix != ".crc"]
    assert {name.partition("-")[0] for name in saved} <= {"part", "_SUCCESS", "model.safetensors"}


KINDS = """
import numpy as np
from pathlib import Path
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dtrain.integrations.spark import frames

builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.memory", "512m").getOrCreate()
random = np.random.default_rng(0)
label = random.integers(0, 3, 200)
x = random.normal(size=(200, 4)) + 4 * np.eye(3, 4)[label]
rows = [(row.tolist(), int(value)) for row, value in zip(x, label)]
df = spark.createDataFrame(rows, "features array<double>, label int").coalesce(1).cache()
words = ["model=mlp", "model.width=16", "steps=80", "batch=32", "optim.lr=0.01", "logger=[]", "hook=[]"]
number = iter(range(100))


def fit(df, *more, out="", **named):
    return frames.fit(df, *words, *more, out=out or f"out{next(number)}", **named)


def right(df, *more):
    model = fit(df, *more)
    rows = model.transform(df).select(F.col("label").cast("double"), "prediction").collect()
    return model.card["kind"], sum(row[0] == row[1] for row in rows) > 0.9 * len(rows)


def refused(name, *more, **named):
    try:
        fit(df, *more, **named)
    except dtrain.DtrainError as error:
        print(name, type(error).__name__, " ".join(str(error).split()))


print("classes", right(df))
print("two", right(df.withColumn("label", (F.col("label") > 0).cast("int"))))
print("double", right(df.withColumn("label", F.col("label").cast("double")), "objective=classification"))
print("boolean", right(df.withColumn("label", F.col("label") > 0)))
print("number", fit(df.withColumn("label", F.col("label").cast("double"))).card["kind"])
dtrain.run("model=mlp", "data=synthetic", "objective=regression", "steps=2", "logger=[]", "hook=[]", out="near")
refused("word", "stepz=3", out="bad")
refused("foreign", out="near")
refused("none", features=[], out="bad")
refused("scheme", out="memory://x/y")
refused("denied", out="/proc/nope")
print("written", Path("bad").exists() or Path("near/rows").exists())
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.campaign("network")
def test_labels_of_any_kind_are_predicted_and_what_is_refused_writes_nothing(tmp_path: Path) -> None:
    skip_without()
    program = tmp_path / "kinds.py"
    program.write_text(KINDS)
    environment = {**os.environ, **variables(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = commands.python(str(program), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.partition(" ")[0] in SAID]
    assert len(said) == len(SAID), done.stdout
    for line, sentence in zip(said, SAID.items(), strict=True):
        assert line.startswith(" ".join(sentence)), line


SAID = {
    "classes": "('class', True)",
    "two": "('class', True)",
    "double": "('class', True)",
    "boolean": "('class', True)",
    "number": "number",
    "word": "WordsError ",
    "foreign": "WordsError out=near holds a run with another model, data",
    "none": "WordsError fit: features=[] names no column. The DataFrame has features, label.",
    "scheme": "StoreError cannot have Spark write the rows to memory://x/y/rows: ",
    "denied": "PreflightError out=/proc/nope: ",
    "written": "False",
}
