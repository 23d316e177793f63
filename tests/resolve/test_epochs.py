"""epochs are the steps of so many passes, known before launch or asked for."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat import talks
from PIL import Image
from small import CPUS, plan
from torch.utils.data import IterableDataset, TensorDataset

import dtrain
from dtrain.build import build
from dtrain.compose import compose
from dtrain.config.period import is_due
from dtrain.data.stream import as_source
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.verb.plan import show

WORDS = ("model=mlp", "data=synthetic", "objective=regression", "data.samples=1000")
OWN = ("model=mlp", "data=dataset", "data.dataset._target_=faces.Faces", "objective=regression", "trust=[faces]")


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (("epochs=3",), 375),
        (("epochs=0.5",), 63),
        (("epochs=3", "batch=7"), 429),
        (("epochs=1", "microbatch=2", "accumulate=5"), 100),
        (("epochs=3", "microbatch=2", "accumulate=2", "data.samples=9"), 7),
    ],
)
def test_steps_follow_from_the_length_and_the_batch(words: tuple[str, ...], steps: int) -> None:
    assert plan(*WORDS, *words).steps == steps


@pytest.mark.parametrize(("words", "steps"), [((), 12), (("data.holdout=0",), 13), (("data.holdout=0.5",), 7)])
def test_a_dataset_that_states_its_length_is_known_without_what_is_held_out(
    words: tuple[str, ...], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faces.py").write_text(
        "raise RuntimeError('it ran')\nclass Faces:\n    about = {'inputs': [4], 'samples': 101}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert plan(*OWN, *words, "epochs=1").steps == steps


def shown(made: Plan) -> str:
    """The plan as it is printed, without the breaks of its lines."""
    return " ".join(show(made).split())


def rows(folder: Path, format: str) -> str:
    """The words for 41 rows, each with a list of tokens and a class."""
    table = pa.table({"x": [[1, 2, 3 + row % 2] for row in range(41)], "y": [row % 3 for row in range(41)]})
    if format == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=7)
    elif format == "csv":
        (folder / "a.csv").write_text("x,y\n" + "".join(f"{row},{row % 3}\n" for row in range(41)))
    else:
        (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    return f"data={format} data.path={folder}/a.{format} data.inputs=x data.targets=y data.cache={folder}/cache"


def images(folder: Path) -> str:
    for number in range(9):
        place = folder / "pictures" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(place / f"{number}.png")
    return f"data=images data.path={folder}/pictures data.size=8 data.cache={folder}/cache model=cnn"


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet", "images"])
def test_an_epoch_is_the_samples_that_the_run_trains_on(format: str, tmp_path: Path) -> None:
    words = images(tmp_path) if format == "images" else f"{rows(tmp_path, format)} model=mlp objective=classification"
    for holdout in (0, 0.1, 0.5):
        made = plan(*words.split(), f"data.holdout={holdout}", "epochs=2.5", "batch=4")
        samples = len(as_source(build(made.data)))
        assert made.steps == math.ceil(2.5 * samples / 4)
        assert f"epochs=2.5 x {samples} samples to train on / batch=4, rounded up; rows of {tmp_path}/" in shown(made)


@pytest.mark.campaign("commands")
def test_data_without_an_index_is_opened_to_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text " * 200)
    text = f"{{data: text, path: {tmp_path}/a.txt, cache: {tmp_path}/cache, sequence: 16}}"
    (tmp_path / "b.txt").write_text("more" * 200)
    made = plan(
        "data=mixture",
        f"data.of={{a: {text}, b: {text.replace('a.txt', 'b.txt')}}}",
        "data.weights={a: 1, b: 3}",
        "epochs=2",
    )
    mixed = as_source(build(made.data))
    assert made.steps == math.ceil(2 * len(mixed) / 8), "an epoch is as many samples as all sources have together"
    assert ", ".join(f"{name} {len(source)}" for name, source in mixed.of.items()) in shown(made)
    (tmp_path / "faces.py").write_text(
        "print('hello')\nclass Faces:\n    def __init__(self, size): self.size = size\n"
        "    def __len__(self): return self.size\n    def __getitem__(self, i): return [0.5], [0.5]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert plan(*OWN, "data.dataset.size=101", "epochs=1").steps == 12
    with pytest.raises(
        WordsError, match=r"cannot be counted: .*__len__ of Faces fails .* Or type steps=<3 x its training"
    ):
        plan(*OWN, "data.dataset.size=-1", "epochs=3")


class Sums:
    """A dataset of a script."""

    def __init__(self, size: int = 101) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(4), torch.ones(1)


class Endless(IterableDataset[float]):
    """Without a length."""

    def __iter__(self) -> Iterator[float]:
        return iter(range(9))


def test_an_object_of_the_caller_has_its_length() -> None:
    words = ("model=mlp", "objective=regression", "batch=10", "epochs=2")
    for given in (Sums(), TensorDataset(torch.ones(101, 4), torch.ones(101, 1)), [([1.0], [1.0])] * 101):
        assert dtrain.plan(*words, data=given).steps == 19, "2 x 91 samples / 10"
    local = type("Local", (Sums,), {"__module__": "__main__"})
    assert dtrain.plan(*words, "data.dataset.size=31", "data.holdout=0", data=local).steps == 7
    with pytest.raises(WordsError, match=r"object has no length .* Or type steps=<2 x its training samples / 10>"):
        dtrain.plan(*words, data=object())
    with pytest.raises(WordsError, match=r"epochs=2: len of Sums is 0, so there is nothing to train on\."):
        dtrain.plan(*words, data=Sums(0))
    with pytest.raises(WordsError, match=r"epochs=2: .*no length .*type data=stream data\.stream\._target_=<"):
        dtrain.plan(*words, data=Endless())


def test_what_has_no_index_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        WordsError, match=r"epochs=3: .* a stream has no index.* Or type steps=<3 x its training samples / 8>"
    ):
        plan("data=stream", "data.path=a.jsonl", "data.inputs=x", "model=mlp", "objective=regression", "epochs=3")
    with pytest.raises(WordsError, match=r"epochs=3: .*gone\.csv.* no file is there"):
        plan("data=csv", f"data.path={tmp_path}/gone.csv", "data.targets=y", "model=mlp", "epochs=3")


def test_a_run_that_is_read_again_counts_nothing(tmp_path: Path) -> None:
    words = f"{rows(tmp_path, 'csv')} model=mlp objective=classification epochs=1 batch=20 model.width=4".split()
    dtrain.run(*words, out=tmp_path / "run")
    (tmp_path / "a.csv").rename(tmp_path / "b.csv")
    assert len(dtrain.load(tmp_path / "run", "model.inputs=[1]", "model.outputs=3").state_dict()) > 0
    assert resolve(compose([], run=str(tmp_path / "run")), CPUS).steps == 2


def test_both_are_one_too_many_and_what_is_typed_goes_before_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(WordsError, match=r"epochs=3 and steps=9 both set the length of the run"):
        plan(*WORDS, "epochs=3", "steps=9")
    (tmp_path / "a.yaml").write_text("epochs: 3\nsteps: 1000\n")
    assert plan(f"recipe={tmp_path}/a.yaml", *WORDS).steps == 375, "as the config.yaml of a run has both"
    assert plan(f"recipe={tmp_path}/a.yaml", *WORDS, "steps=9").steps == 9


def test_the_rules_of_length_count_those_steps() -> None:
    with pytest.raises(WordsError, match=r"stop_after=400 is never reached: steps=375"):
        plan(*WORDS, "epochs=3", "stop_after=400")


def test_conversations_are_counted_as_the_run_has_them(tmp_path: Path) -> None:
    talks.tokenizer(tmp_path / "tk")
    rows = talks.write(tmp_path / "rows.jsonl", talks.talks())
    words = (
        "data=chat",
        f"data.path={rows}",
        f"data.tokenizer={tmp_path}/tk",
        f"data.cache={tmp_path}/cache",
        "batch=2",
    )
    for more in ((), ("data.holdout=0",), ("data.holdout=0.5",)):
        made = plan(*words, *more, "epochs=3")
        source = build(made.data)
        assert made.steps == math.ceil(3 * len(source) / 2) > 3
    made = plan(*words, "data.packing=pack", "data.sequence=64", "epochs=3")
    assert made.steps == math.ceil(3 * len(build(made.data)) / 2)
    with pytest.raises(WordsError, match=r"gone\.jsonl"):
        plan(*words, f"data.path={tmp_path}/gone.jsonl", "epochs=3")


def test_a_period_may_be_an_epoch() -> None:
    made = plan(*WORDS, "evaluate.every=epoch", "checkpoint.every=epoch", "steps=9")
    assert (made.evaluate_every, made.checkpoint["every"], made.steps) == (125, 125, 9)
    assert "every 125 steps (auto: an epoch, 1000 samples to train on / batch=8; data.samples)" in shown(made)
    made = plan(*WORDS, "evaluate.every=epoch", "epochs=3", "batch=96")
    assert (made.evaluate_every, made.steps) == ("125/12", 32), "an epoch of 10.4 steps ends within step 11"
    assert [step for step in range(1, 33) if is_due(made.evaluate_every, step)] == [11, 21, 32]
    stream = ("data=stream", "data.path=a.jsonl", "data.inputs=x", "model=mlp", "objective=regression")
    for key in ("evaluate.every", "checkpoint.every"):
        wrong = rf"{key}=epoch: .* a stream has no index.* Or type {key}=<its training samples / 8>"
        with pytest.raises(WordsError, match=wrong):
            plan(*stream, f"{key}=epoch")


def test_a_run_evaluates_and_saves_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    words = f"{rows(tmp_path, 'csv')} model=mlp objective=classification epochs=3 batch=8 data.holdout=0.5 logger=[]"
    every = "evaluate.every=epoch checkpoint.every=epoch checkpoint.keep=null"
    out = tmp_path / "run"
    for more in (["stop_after=4"], []):
        dtrain.run(*words.split(), *every.split(), *more, out=out)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert sorted({event["step"] for event in events if event["event"] == "evaluated"}) == [3, 4, 6, 8]
    assert sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")) == [3, 4, 6, 8]
    (tmp_path / "a.csv").rename(tmp_path / "b.csv")
    assert len(dtrain.load(out, "model.inputs=[1]", "model.outputs=3").state_dict()) > 0
