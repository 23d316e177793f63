"""The loop as a whole: the same losses on every mesh, exact resume, every step accounted for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from pool import ranks, resident
from torch import nn

from dtrain.build import build
from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.commit import find
from dtrain.checkpoint.load import Reading
from dtrain.cluster import Cluster
from dtrain.parallel import order
from dtrain.planned import Plan
from dtrain.train import train

TINY = [
    "steps=12",
    "batch=8",
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "data.sequence=16",
    "hook=[]",
    "logger=[]",
    "evaluate.samples=10",
]
ONE = Cluster(gpus=0, cpus=1)


def plan(out: Path, corpus: Path, *words: str) -> Plan:
    return small.plan(*TINY, f"data.path={corpus}", f"out={out}", *words, on=ONE)


def run(plan: Plan) -> Any:
    """Train on the plan's number of ranks, which stay for the next run. Rank 0's result."""
    return resident(plan.world, train, plan)[0]


def run_afresh(plan: Plan) -> Any:
    """`run` on new ranks: for a start that must lean on no memory of the one before, or in a process that a test has changed."""
    return ranks(plan.world, train, plan)[0]


def rows(out: Path) -> dict[int, dict[str, Any]]:
    listed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row for row in listed}
    assert len(by_step) == len(listed), "a step has two rows"
    return by_step


def weights(out: Path) -> dict[str, torch.Tensor]:
    url, commit = find(str(out))
    found = {
        name: torch.zeros(facts["shape"]) for name, facts in commit["tensors"].items() if name.startswith("model.")
    }
    Reading(url, commit, found).fill()
    return found


def assert_same(reference: Path, other: Path) -> None:
    """Losses and gradient norms at every step within 1e-5, weights within 1e-4 (promise 1)."""
    a, b = rows(reference), rows(other)
    assert sorted(a) == sorted(b)
    for step in a:
        assert b[step]["loss"] == pytest.approx(a[step]["loss"], rel=1e-5), step
        assert b[step]["norm"] == pytest.approx(a[step]["norm"], rel=1e-4), step
        assert b[step]["seen"] == a[step]["seen"]
    theirs = weights(other)
    for name, tensor in weights(reference).items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-4 * float(tensor.abs().max()))


LAYOUTS = {
    "accumulation": ["microbatch=2"],
    "ddp 1": ["strategy=ddp"],
    "ddp 2": ["strategy=ddp", "devices=2"],
    "ddp 2 accumulation": ["strategy=ddp", "devices=2", "microbatch=1"],
    "fsdp 1": ["strategy=fsdp"],
    "fsdp 2": ["strategy=fsdp", "devices=2"],
    "fsdp 2 accumulation": ["strategy=fsdp", "devices=2", "microbatch=2"],
    "fsdp 2 without resharding": ["strategy=fsdp", "devices=2", "strategy.reshard=never"],
    "hsdp 2 x 2": ["strategy=hsdp", "nodes=2", "devices=2"],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(out of one process's run, its corpus)."""
    folder = tmp_path_factory.mktemp("reference")
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"line {number} says {number * number}\n" for number in range(2000)))
    run(plan(folder / "out", corpus))
    return folder / "out", corpus


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mesh_gives_the_losses_of_one_process(layout: str, reference: tuple[Path, Path], tmp_path: Path) -> None:
    run(plan(tmp_path, reference[1], *LAYOUTS[layout]))
    assert_same(reference[0], tmp_path)


@pytest.mark.parametrize("optim", ["sgd", "muon", "adafactor"])
def test_every_optimizer_gives_the_same_losses_on_shards(
    optim: str, reference: tuple[Path, Path], tmp_path: Path
) -> None:
    words = [f"optim={optim}", "schedule.warmup=2"]
    run(plan(tmp_path / "one", reference[1], *words))
    run(plan(tmp_path / "two", reference[1], *words, "strategy=fsdp", "devices=2"))
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    ("first", "second"),
    [([], []), ([], ["strategy=fsdp", "devices=2"]), (["strategy=fsdp", "devices=2"], ["microbatch=2"])],
)
def test_a_stopped_run_goes_on_as_if_it_had_not(
    first: list[str], second: list[str], reference: tuple[Path, Path], tmp_path: Path
) -> None:
    stopped = run(plan(tmp_path, reference[1], "stop_after=5", *first))
    assert (stopped.status, stopped.step, stopped.exit_code) == ("stopped", 5, 0)
    assert run_afresh(plan(tmp_path, reference[1], *second)).status == "finished"
    assert_same(reference[0], tmp_path)


def evaluated(out: Path) -> dict[int, list[float]]:
    """Step -> the held-out losses that events.jsonl has of it."""
    events = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    losses: dict[int, list[float]] = {}
    for event in events:
        if event["event"] == "evaluated":
            losses.setdefault(event["step"], []).append(event["eval_loss"])
    return losses


def test_a_run_evaluates_where_stop_after_ends_it(reference: tuple[Path, Path], tmp_path: Path) -> None:
    """The figure of a stop is the one that a run without stops has there; a later stop goes on from it."""
    run(plan(tmp_path / "whole", reference[1], "evaluate.every=1"))
    wanted = evaluated(tmp_path / "whole")
    for after in (4, 7, 7):  # the last start finds nothing to train
        stopped = run(plan(tmp_path / "parts", reference[1], "evaluate.every=0", f"stop_after={after}"))
        assert (stopped.status, stopped.step) == ("stopped", after)
        assert stopped.metrics["eval_loss"] == wanted[after][0]
        saved = json.loads((tmp_path / "parts" / "result.json").read_text())
        assert saved["metrics"]["eval_loss"] == wanted[after][0]
    done = run_afresh(plan(tmp_path / "parts", reference[1], "evaluate.every=0"))
    assert (done.status, done.metrics["eval_loss"]) == ("finished", wanted[12][0])
    assert evaluated(tmp_path / "parts") == {4: wanted[4], 7: 2 * wanted[7], 12: wanted[12]}
    losses = [{step: row["loss"] for step, row in rows(tmp_path / name).items()} for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_the_same_mesh_resumes_bit_for_bit(reference: tuple[Path, Path], tmp_path: Path) -> None:
    run(plan(tmp_path, reference[1], "stop_after=7"))
    run_afresh(plan(tmp_path, reference[1]))
    for name, tensor in weights(reference[0]).items():
        assert torch.equal(weights(tmp_path)[name], tensor), name


def test_the_time_of_a_run_counts_from_its_first_start(reference: tuple[Path, Path], tmp_path: Path) -> None:
    run(plan(tmp_path, reference[1], "stop_after=11"))
    url, commit = find(str(tmp_path))
    (Path(url) / commits.NAME).unlink()
    commits.write(url, {**commit, "facts": {**commit["facts"], "seconds": 1e6}})
    assert run_afresh(plan(tmp_path, reference[1])).wall_seconds > 1e6


def test_rows_written_after_the_last_checkpoint_are_replaced(reference: tuple[Path, Path], tmp_path: Path) -> None:
    run(plan(tmp_path, reference[1], "stop_after=5"))
    journal = tmp_path / "metrics.jsonl"
    lost = {**rows(tmp_path)[5], "step": 6, "loss": 99.0}
    journal.write_text(journal.read_text() + json.dumps(lost) + '\n{"step": 7, "lo')  # and a line torn by a kill
    run(plan(tmp_path, reference[1]))
    assert_same(reference[0], tmp_path)


class Blindfolded(nn.Linear):
    """Raises in evaluation while `cover` is there."""

    def __init__(self, cover: str) -> None:
        super().__init__(64, 10)
        self.cover = Path(cover)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and self.cover.exists():
            raise RuntimeError("nothing to be seen")
        return super().forward(x)


class Unlabelled:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((64,), 1.0 * index), -100 if index % 2 else index % 3


def with_model(out: Path, *words: str) -> Plan:
    return small.plan("steps=6", f"out={out}", f"trust=[{__name__.partition('.')[0]}]", "logger=[]", *words, on=ONE)


@pytest.mark.parametrize("stop", [[], ["stop_after=4"]])
def test_a_failing_evaluation_loses_no_step(stop: list[str], tmp_path: Path) -> None:
    cover = tmp_path / "cover"
    cover.touch()
    words = [
        f"model._target_={__name__}.Blindfolded",
        f"model.cover={cover}",
        "data=synthetic",
        "objective=regression",
        "data.samples=256",
        *stop,
    ]
    status, last = ("stopped", 4) if stop else ("finished", 6)
    with pytest.raises(RuntimeError, match="nothing to be seen"):
        train(with_model(tmp_path / "out", *words))
    assert find(str(tmp_path / "out"))[1]["step"] == last
    cover.unlink()
    result = train(with_model(tmp_path / "out", *words))
    assert (result.status, result.step) == (status, last)
    assert result.metrics["eval_loss"] > 0, "what was missing is made up for"


def test_a_batch_in_which_nothing_counts_is_a_step_without_a_loss(tmp_path: Path) -> None:
    words = [
        "model._target_=torch.nn.Linear",
        "model.in_features=64",
        "model.out_features=3",
        "batch=1",
        "objective=classification",
    ]
    train(with_model(tmp_path, *words, "data=dataset", f"data.dataset._target_={__name__}.Unlabelled"))
    losses = [row.get("loss") for row in rows(tmp_path).values()]
    assert None in losses
    assert all(loss is None or loss > 0 for loss in losses)


def test_dropout_draws_the_same_after_a_restart_and_on_ranks_that_split_a_layer(tmp_path: Path) -> None:
    def words(out: Path, *more: str) -> Plan:
        target = [
            "model._target_=dropping.Net",
            "trust=[dropping]",
            "data=synthetic",
            "objective=regression",
            "data.samples=256",
            "logger=[]",
        ]
        return small.plan(*target, "steps=6", "batch=8", f"out={out}", *more, on=ONE)

    run(words(tmp_path / "whole"))
    run(words(tmp_path / "parts", "stop_after=3"))
    run_afresh(words(tmp_path / "parts"))
    run(words(tmp_path / "split", "strategy=ddp", "devices=2", "mesh.tp=2"))
    whole, parts, split = (
        {step: row["loss"] for step, row in rows(tmp_path / name).items()} for name in ("whole", "parts", "split")
    )
    assert whole == parts and split == pytest.approx(whole, rel=1e-5)


def test_weights_are_drawn_by_a_run_that_begins_and_by_no_other(
    reference: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(words: list[str]) -> int:
        drawn = list[str]()
        fill = order.fill
        monkeypatch.setattr(order, "fill", lambda model, seed: (drawn.append("all"), fill(model, seed)))
        return ranks(1, lambda: (train(plan(tmp_path / "out", reference[1], *words)), len(drawn))[1])[0]

    assert filled(["stop_after=3"]) == 1
    assert filled(["stop_after=6"]) == 0
    assert filled(["steps=1", f"init={reference[0]}", f"out={tmp_path / 'other'}"]) == 0


def test_an_average_begins_as_the_weights_of_init(reference: tuple[Path, Path], tmp_path: Path) -> None:
    run(plan(tmp_path, reference[1], f"init={reference[0]}", "steps=1", "optim.lr=1e-9", "ema=0.5"))
    url, commit = find(str(tmp_path))
    averages = {
        name: torch.zeros(facts["shape"]) for name, facts in commit["tensors"].items() if name.startswith("ema.")
    }
    Reading(url, commit, averages).fill()
    assert averages
    for name, average in averages.items():
        torch.testing.assert_close(average, weights(reference[0])[name.replace("ema.", "model.")], rtol=0, atol=1e-6)


def test_init_takes_the_weights_and_starts_anew(reference: tuple[Path, Path], tmp_path: Path) -> None:
    run(plan(tmp_path, reference[1], f"init={reference[0]}", "steps=1", "optim.lr=1e-9"))
    first = rows(tmp_path)[1]
    assert first["seen"] == 8
    assert first["loss"] < rows(reference[0])[1]["loss"] - 0.3  # it has learnt before
    for name, tensor in weights(reference[0]).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 3e-2), ("fp16", 3e-2)])
def test_lower_precision_stays_near_on_every_mesh(
    precision: str, tolerance: float, reference: tuple[Path, Path], tmp_path: Path
) -> None:
    for name, words in {
        "one": [],
        "ddp": ["strategy=ddp", "devices=2"],
        "fsdp": ["strategy=fsdp", "devices=2"],
    }.items():
        run(plan(tmp_path / name, reference[1], f"precision={precision}", *words))
        for step, row in rows(tmp_path / name).items():
            assert row["loss"] == pytest.approx(rows(reference[0])[step]["loss"], rel=tolerance), (name, step)


def test_other_data_is_refused_by_name(reference: tuple[Path, Path], tmp_path: Path) -> None:
    run(plan(tmp_path, reference[1], "stop_after=3"))
    other = tmp_path / "other.txt"
    other.write_text(reference[1].read_text()[::-1])
    with pytest.raises(AssertionError, match="other data"):
        run_afresh(plan(tmp_path, other))


def test_weights_that_were_not_drawn_are_not_trained(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage may go away between two looks at it: the values of a model that its checkpoint should have brought are whatever the memory held."""
    run(plan(tmp_path, corpus, "stop_after=3"))
    monkeypatch.setattr(commits, "candidates", lambda out: [])
    with pytest.raises(AssertionError, match="were there a moment ago, but are gone"):
        run_afresh(plan(tmp_path, corpus))


def test_a_fork_goes_on_with_weights_optimizer_and_position(reference: tuple[Path, Path], tmp_path: Path) -> None:
    """With the same words it is the run that it was forked from, bit for bit; and it needs that run no more."""
    corpus, source = reference[1], tmp_path / "source"
    run(plan(source, corpus, "stop_after=5"))
    fork = f"fork={source}"
    (step,) = (source / "checkpoints").iterdir()
    for name, place in {"run": source, "step": step, "attempt": next(step.iterdir())}.items():
        stopped = run(plan(tmp_path / name, corpus, f"fork={place}", "stop_after=7"))
        assert (stopped.status, stopped.step) == ("stopped", 7)
        assert list(rows(tmp_path / name)) == [6, 7]
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000007")  # it was killed before that save
    assert run_afresh(plan(tmp_path / "run", corpus, fork)).status == "finished"
    wanted = rows(reference[0])
    for step, row in rows(tmp_path / "run").items():
        assert (row["loss"], row["seen"], row["lr"]) == (wanted[step]["loss"], wanted[step]["seen"], wanted[step]["lr"])
    assert list(rows(tmp_path / "run")) == [6, 7, 8, 9, 10, 11, 12]
    for name, tensor in weights(reference[0]).items():
        assert torch.equal(weights(tmp_path / "run")[name], tensor), name
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "forked"] == [5]
    assert not any("lacks the rows" in event.get("text", "") for event in events)


def test_a_fork_has_other_words_and_another_mesh(reference: tuple[Path, Path], tmp_path: Path) -> None:
    corpus, source = reference[1], tmp_path / "source"
    run(plan(source, corpus, "stop_after=5"))
    words = [f"fork={source}", "optim.lr=0.01", "steps=20"]
    run(plan(tmp_path / "one", corpus, *words, "stop_after=8"))
    run(plan(tmp_path / "two", corpus, *words, "stop_after=8", "strategy=fsdp", "devices=2"))
    factor = schedule_of(20)
    for step in (6, 7, 8):
        one, two = rows(tmp_path / "one")[step], rows(tmp_path / "two")[step]
        assert one["lr"] == pytest.approx(0.01 * factor(step - 1))
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert rows(tmp_path / "one")[8]["loss"] != rows(reference[0])[8]["loss"]


def schedule_of(steps: int) -> Any:
    decided = small.plan(*TINY, f"steps={steps}", on=ONE)
    return build(decided.schedule, steps=steps).factor


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model.width=64", "model.heads=2"], "Type the model and optim of that run, or init="),
        (["optim=sgd"], "Type the model and optim of that run, or init="),
        (["batch=4"], r"other data \(batch"),
        (["seed=1"], "another seed. Type seed="),
    ],
)
def test_what_cannot_go_on_is_refused(
    words: list[str], sentence: str, reference: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        run_afresh(plan(tmp_path, reference[1], f"fork={reference[0]}", "steps=20", *words))
    assert not list(tmp_path.glob("checkpoints/*/*/COMMIT.json"))
