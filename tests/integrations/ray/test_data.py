"""Rows of a Ray Dataset by their place in it: the losses of the same rows on one process, whatever the blocks and the mesh."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
import ray_cluster
from ray_cluster import Cluster
from ray_rows import labels, pixels

from dtrain.errors import PreflightError
from dtrain.integrations.ray import data as source

UNEVEN = (257, 1, 0, 257)
"""Rows of the files."""
WORDS = (
    "model=mlp", "model.width=16", "objective=classification", "data.outputs=3", "data.inputs=pixels", "data.targets=label",
    "batch=16", "steps=40", "evaluate.every=20", "logger=[]", "hook=[]", "seed=3", "checkpoint.every=20", "trust=[ray_rows]",
)  # fmt: skip
LOCAL = ("data=dataset", "data.dataset._target_=ray_rows.Local")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster.running() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files with uneven numbers of rows."""
    import pyarrow
    from pyarrow import parquet

    folder, first = tmp_path_factory.mktemp("rows"), 0
    for number, count in enumerate(UNEVEN):
        part = slice(first, first + count)
        rows = pyarrow.array([*pixels()[part]], pyarrow.list_(pyarrow.float64()))
        parquet.write_table(pyarrow.table({"pixels": rows, "label": labels()[part]}), folder / f"{number}.parquet")
        first += count
    return folder


def losses(folder: Path, out: str, *words: str, address: str = "") -> list[Any]:
    """The losses of a run, of training and of evaluation."""
    env = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": ray_cluster.PATH}
    done = commands.run(*WORDS, *words, f"out={out}", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (folder / out / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("loss"), line.get("eval/loss")) for line in lines]


@pytest.mark.slow
@pytest.mark.campaign("network")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_world_has_the_losses_of_the_same_rows_without_ray(
    world: int, tmp_path: Path, cluster: Cluster, files: Path
) -> None:
    mesh = ("strategy=ddp", f"devices={world}") if world > 1 else ()
    near = losses(tmp_path, "near", *LOCAL, *mesh)
    path = os.path.relpath(files, tmp_path)
    assert losses(tmp_path, "far", "data=ray", f"data.path={path}", *mesh, address=cluster.address) == near
    assert len(near) >= 40


ROWS = """
import signal, sys, threading
from functools import partial
import numpy as np, torch
import ray_rows
from dtrain.integrations.ray import data as source
from dtrain.errors import DtrainError

def rows(blocks, *names):
    return source.Rows(partial(ray_rows.dataset, blocks), names or ("pixels", "label"), None)

def sentence(make):
    try:
        make()
    except DtrainError as error:
        print(error)

before = signal.getsignal(signal.SIGTERM), sys.excepthook, sys.unraisablehook
one = rows(1)
assert before == (signal.getsignal(signal.SIGTERM), sys.excepthook, sys.unraisablehook)
order = torch.from_numpy(np.random.default_rng(1).permutation(ray_rows.ROWS))
whole = one[order]
assert torch.equal(torch.from_numpy(whole["pixels"]), torch.from_numpy(ray_rows.pixels())[order].float())
assert torch.equal(torch.from_numpy(whole["label"]), torch.from_numpy(ray_rows.labels())[order])
source.SHARE = 0  # a large one
seven = rows(7)
assert len(seven) == ray_rows.ROWS and all((seven[order][name] == whole[name]).all() for name in whole)
assert (seven[514]["pixels"] == one[514]["pixels"]).all()
sentence(lambda: rows(1, "image"))
sentence(lambda: source.Rows(ray_rows.no_dataset, ["pixels"], None))
sentence(lambda: source.Rows(ray_rows.failing, ["pixels"], None))
sentence(lambda: source.Rows(ray_rows.empty, ["tokens"], None))
for name in "label", "pixels":
    sentence(lambda: source.Rows(partial(ray_rows.holes, name), [name], None))
import ray
from dtrain.data.dataset import Dataset
sentence(lambda: Dataset(ray_rows.dataset(1)))
words = dict(path=None, dataset=ray_rows.ragged, cluster=None, holdout=0.0, inputs="tokens", targets="tokens", shift=True, outputs=None, length=None)
three = np.arange(3), np.zeros(3, np.int64)
sentence(lambda: source.build(**words, pad=None).take(*three))
odd = source.Rows(ray_rows.odd, ["x"], None)
sentence(lambda: odd[torch.arange(3)])
batch = source.build(**words, pad=0).take(*three)
print(batch["inputs"].tolist(), batch["targets"].tolist())
"""


@pytest.mark.slow
@pytest.mark.campaign("network")
def test_rows_are_the_same_in_any_blocks_and_by_either_way(tmp_path: Path, cluster: Cluster) -> None:
    env = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": ray_cluster.PATH}
    done = commands.python("-c", ROWS, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "data: the rows have no column image. They have pixels, label.",
        "data: Ray cannot read the rows: data.dataset returned a list, and no ray.data.Dataset",
        "data: Ray cannot read the rows: KeyError: 'rows'",
        "data: there is no row in the Dataset.",
        "data: column label has 2 null(s) in 4 rows. Drop them.",
        "data: column pixels has arrays with nulls. Fill them.",
        "data.dataset: Dataset is not map-style: it needs __len__ and __getitem__. Type data=ray data.dataset._target_=<a "
        "function of yours that returns it>.",
        "data: the rows of tokens have different lengths, 1 to 3. Type data.pad=<the padding token>.",
        "data: column x has NaN in row 2. Drop or fill it.",
        "[[5, 6, 0], [1, 2, 3], [4, 0, 0]] [[6, -100, -100], [2, 3, -100], [-100, -100, -100]]",
    ]


@pytest.mark.slow
@pytest.mark.campaign("kills")
def test_a_run_on_ray_goes_on_with_the_next_row(tmp_path: Path, cluster: Cluster) -> None:
    words = ("strategy=ddp", "nodes=2", "devices=2", "launcher.wait=30")
    far = ("data=ray", "data.dataset._target_=ray_rows.dataset", "data.dataset.blocks=7", "launcher=ray")
    killed = (
        "hook.fault._target_=dtrain.testing.faults.AtStep",
        "hook.fault.action=kill",
        "hook.fault.step=25",
        "hook.fault.rank=3",
    )
    near = losses(tmp_path, "near", *LOCAL, *words, *killed, "launcher=local")
    assert losses(tmp_path, "far", *far, *words, *killed, address=cluster.address) == near


@pytest.mark.slow
@pytest.mark.campaign("network")
def test_a_run_that_leaves_no_cpu_for_the_dataset_says_so(tmp_path: Path, cluster: Cluster) -> None:
    words = ("data=ray", "data.dataset._target_=ray_rows.dataset", "data.dataset.blocks=7", "launcher=ray", "nodes=3")
    env = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": ray_cluster.PATH}
    all_of_it = ("strategy=ddp", "devices=2", "threads=1", "batch=12", "launcher.wait=30", "out=run")
    done = commands.run(*WORDS, *words, *all_of_it, cwd=tmp_path, env=env)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert (
        "no CPU of the cluster is free to execute the Dataset: runs have reserved 6 of 6. Type devices= or threads= that "
        "leave one."
    ) in done.stderr


def test_nulls_of_a_block_are_counted_also_those_inside_arrays() -> None:
    pa = pytest.importorskip("pyarrow", reason="pip install 'dtrain[ray]'")
    block = pa.table({"x": [[1, None], None, [None]], "y": [1, 2, 3], "z": [None, None, 1.0]})
    rows, nulls = source.survey(block, ["x", "y", "z", "none"])
    assert rows == 3 and {at: count for at, count in nulls.items() if count} == {
        ("x", False): 1,
        ("x", True): 2,
        ("z", False): 2,
    }


def test_an_error_of_ray_says_which_one() -> None:
    assert source._reason(FileNotFoundError("rows")) == "FileNotFoundError: rows"
    outer = RuntimeError("many lines")
    outer.cause = KeyError("pixels")  # type: ignore[attr-defined] # as Ray's errors have
    assert source._reason(outer) == "KeyError: 'pixels'"
    assert source._reason(PreflightError("a sentence")) == "a sentence"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "data=ray reads one Dataset. Type data.path=<Parquet files>, or data.dataset._target_="),
        (("data.path=a", "data.dataset._target_=ray_rows.no_dataset"), "data=ray reads one Dataset"),
        (("data.path=a", "data.cluster=here"), "data.cluster=here: here is not <host>:<port>"),
        (
            ("data.path=a", "data.cluster=127.0.0.1:1"),
            "no Ray cluster answers at 127.0.0.1:1: connection refused. Type data.cluster=",
        ),
    ],
)
def test_what_cannot_be_read_is_said(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not here. Type: pip install 'dtrain[ray]'")
    (tmp_path / "a").touch()
    env = {**os.environ, "PYTHONPATH": ray_cluster.PATH}
    done = commands.run(*WORDS, "data=ray", *words, "out=run", cwd=tmp_path, env=env)
    assert done.returncode in (2, 3) and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr
