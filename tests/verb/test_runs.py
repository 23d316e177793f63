"""runs lists what is there, names the best by what its objective says is better, and removes only what it was told to and nobody holds."""

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from dtrain.__main__ import main
from dtrain.errors import LeaseError, StoreError, WordsError
from dtrain.lifecycle.signals import StopRequested
from dtrain.storage import lease, store
from dtrain.verb import runs, train

WORDS = ["model=mlp", "data=synthetic", "data.samples=256", "steps=6", "logger=[]", "launcher=inline", "devices=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, of classification."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train.run([*WORDS, "objective=classification", f"out={out}"]) == 0
    return out


@pytest.fixture
def made(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A copy of the run as runs/<name>, with other figures and another lr."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, *, lr: float = 0.001, **figures: float) -> Path:
        place = tmp_path / "runs" / name
        shutil.copytree(run, place)
        config = (place / "config.yaml").read_text()
        (place / "config.yaml").write_text(config.replace("  lr: 0.001\n", f"  lr: {lr}  # command line\n"))
        events = [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]
        events = [{**event, **(figures if event["event"] == "evaluated" else {})} for event in events]
        (place / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return place

    return make


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert runs.run(words) == 0
    return capsys.readouterr().out.splitlines()


def names(lines: list[str]) -> list[str]:
    """Of the rows, in their order."""
    head = next(number for number, line in enumerate(lines) if line.startswith("name "))
    return [line.split()[0] for line in lines[head + 1 :]]


def test_runs_that_differ_in_their_seed_alone_have_a_mean(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed, lr, loss in (("a", 1, 0.5, 1.0), ("b", 2, 0.5, 3.0), ("c", 1, 0.25, 7.0)):
        config = made(name, lr=lr, eval_loss=loss) / "config.yaml"
        config.write_text(re.sub(r"\nseed: \d+.*", f"\nseed: {seed}  # command line", config.read_text()))
    lines = shown(capsys, "runs")
    head = next(number for number, line in enumerate(lines) if line.startswith("seeds "))
    (row,) = lines[head + 1 :]
    assert row.split()[:4] == ["2", "2", "±", "1.4"] and "optim.lr=0.5" in row, "one seed alone has no mean"


def test_a_line_says_what_differs_and_what_is_shared_stands_once(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    made("a", lr=0.5, eval_accuracy=0.25)
    made("sweep/b", lr=0.25)
    lines = shown(capsys, "runs")
    assert (
        lines[0].startswith("all runs: ")
        and "model=mlp" in lines[0]
        and "data.samples=256" in lines[0]
        and "optim.lr" not in lines[0]
    )
    assert sorted(names(lines)) == ["a", "sweep/b"]
    a = next(line for line in lines if line.startswith("a "))
    assert a.split()[-2:] == ["finished", "optim.lr=0.5"] and " 6 " in a and " 0.25 " in a
    assert "eval_accuracy" in lines[1] and "eval_loss" in lines[1]
    assert names(shown(capsys)) == ["runs/a", "runs/sweep/b"], (
        "without a folder, those of ./outputs and ./runs, as they can be typed"
    )


def test_a_default_that_was_said_stands_beside_other_values_of_it(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a sweep that has the default among its values."""
    for name, lr in (("a", 0.5), ("b", 0.001), ("c", 0.0001)):
        made(name, lr=lr)
    assert [line.split()[-1] for line in shown(capsys, "runs")[2:]] == [
        "optim.lr=0.5",
        "optim.lr=0.001",
        "optim.lr=0.0001",
    ]
    assert names(shown(capsys, "runs", "sort=optim.lr")) == ["c", "b", "a"]
    shutil.rmtree("runs/a")
    shutil.rmtree("runs/c")
    assert "optim.lr" not in "".join(shown(capsys, "runs"))


def test_what_a_rerun_says_again_is_no_change(made: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    place = made("a")
    config = (place / "config.yaml").read_text()
    (place / "config.yaml").write_text(
        "\n".join(line if line[-1:] in ":" or "  # " in line else f"{line}  # x.yaml:3" for line in config.splitlines())
    )
    (line,) = shown(capsys, "runs/a")[1:]
    assert sorted(line.split("finished")[1].split()) == sorted(
        [
            "model=mlp",
            "data=synthetic",
            "data.samples=256",
            "steps=6",
            "logger=[]",
            "launcher=inline",
            "devices=1",
            "objective=classification",
        ]
    )


@pytest.mark.parametrize(("figure", "best"), [("eval_loss", "b"), ("eval_accuracy", "a")])
def test_the_best_is_told_by_the_direction_of_its_figure(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str], figure: str, best: str
) -> None:
    for name, loss, accuracy in (("a", 3.0, 0.9), ("b", 1.0, 0.5), ("c", 2.0, 0.1)):
        made(name, eval_loss=loss, eval_accuracy=accuracy)
    assert names(shown(capsys, "best", "runs", f"figure={figure}")) == [best]
    assert names(shown(capsys, "runs", f"sort={figure}"))[-1] == best
    assert names(shown(capsys, "runs", f"sort=-{figure}"))[0] == best


def test_the_figure_that_checkpoints_were_kept_by_comes_first(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, loss, accuracy in (("a", 3.0, 0.9), ("b", 1.0, 0.5)):
        place = made(name, eval_loss=loss, eval_accuracy=accuracy)
        plan = (place / "plan.yaml").read_text()
        (place / "plan.yaml").write_text(
            re.sub(r"best: null,\s+best_is: lowest", "best: eval_accuracy, best_is: highest", plan)
        )
    assert names(shown(capsys, "best", "runs")) == ["a"]


def test_a_figure_nobody_stated_asks_for_its_direction(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    made("a", eval_f1=0.9)
    made("b", eval_f1=0.5)
    with pytest.raises(WordsError, match=r"which eval_f1 is the best. Type best_is=lowest or best_is=highest"):
        runs.run(["best", "runs", "figure=eval_f1"])
    assert names(shown(capsys, "best", "runs", "figure=eval_f1", "best_is=highest")) == ["a"]
    with pytest.raises(WordsError, match=r"a figure eval_f2.*Did you mean eval_f1"):
        runs.run(["best", "runs", "figure=eval_f2"])


def test_columns_and_words_sort_as_numbers(made: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr in (("a", 10.0), ("b", 9.0), ("c", 0.001)):
        made(name, lr=lr)
    assert names(shown(capsys, "runs", "sort=optim.lr")) == ["c", "b", "a"]
    assert names(shown(capsys, "runs", "sort=-name")) == ["c", "b", "a"]
    with pytest.raises(WordsError, match=r"sort=optim\.lrr: there is no such column. Did you mean optim\.lr"):
        runs.run(["runs", "sort=optim.lrr"])


def ended_pid() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_status_is_that_of_the_last_event_and_of_the_lease(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = made("a")
    events = (place / "events.jsonl").read_text().splitlines()
    started = next(line for line in events if '"started"' in line)
    [written] = (place / "lease").iterdir()
    back = json.loads(written.read_text())
    left = {**back, "state": "held", "pid": ended_pid()}
    for more, record, status in (
        ([], left, "finished"),
        ([started], left, "died"),
        ([started, '{"time": 1, "event": "failed"}'], left, "failed"),
        ([started, '{"time": 1, "ev'], left, "died"),
        ([started], back, "interrupted"),
        ([started], {**back, "exit_code": 75}, "preempted"),
        ([started, '{"time": 1, "event": "failed"}'], {**back, "exit_code": 130}, "interrupted"),
    ):
        written.write_text(json.dumps(record))
        (place / "events.jsonl").write_text("\n".join([*events, *more]))
        assert status in shown(capsys, "runs/a")[1], more
    with lease.hold(str(place)):
        assert "running" in shown(capsys, "runs/a")[1]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StopRequested(signal.SIGINT), "interrupted"),
        (StopRequested(signal.SIGTERM), "preempted"),
        (KeyboardInterrupt(), "interrupted"),
        (WordsError("another"), "never began"),
    ],
)
def test_a_run_that_ended_before_it_started_has_the_word_for_why(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str], error: BaseException, status: str
) -> None:
    place = made("a")
    for file in ("result.json", "metrics.jsonl", "events.jsonl"):
        (place / file).unlink()
    with pytest.raises(type(error)), lease.hold(str(place)):
        raise error
    assert status in shown(capsys, "runs/a")[1]


def test_a_run_of_a_loop_that_writes_no_events_has_the_status_of_its_result(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = made("a")
    (place / "events.jsonl").unlink()
    (place / "metrics.jsonl").unlink()
    line = shown(capsys, "runs/a")[1].split()
    assert "finished" in line and "6" in line
    (place / "result.json").write_text('{"status": "all is well", "step": 6}')
    assert "never began" in shown(capsys, "runs/a")[1]


@pytest.mark.parametrize("events", ["", '{"time": 1, "event": "started"}'])
def test_a_run_that_wrote_no_end_but_left_a_failure_has_failed(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str], events: str
) -> None:
    place = made("a")
    (place / "result.json").unlink()
    (place / "events.jsonl").write_text(events)
    (place / "failure.json").write_text('{"error": "rank 0 was killed"}')
    assert "failed" in shown(capsys, "runs/a")[1]


def test_elsewhere_they_are_listed_alike(made: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    here = made("sweep/lr-0.5", lr=0.5), made("b")
    fs = fsspec.filesystem("memory")
    for place in here:
        for path in place.rglob("*"):
            if path.is_file():
                fs.pipe_file(f"/listed/{path.relative_to(here[1].parent)}", path.read_bytes())
    before = {path: fs.cat_file(path) for path in fs.find("/listed")}
    assert shown(capsys, "memory://listed") == shown(capsys, "runs")
    assert {path: fs.cat_file(path) for path in fs.find("/listed")} == before


def test_what_strangers_wrote_is_shown_and_acts_on_no_terminal(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = made("evil\x1b[2J\ndtrain: all is well")
    config = (place / "config.yaml").read_text()
    (place / "config.yaml").write_text(
        config.replace("seed: 0\n", 'seed: "\x1b]0;x\x07"  # command line\n')
        + 'api_key: "hunter2hunter2hunter2"  # x\n'
    )
    events = (place / "events.jsonl").read_text().replace("eval_loss", "eval_\\u001b[31mloss\\nx")
    (place / "events.jsonl").write_text(events)
    text = "\n".join(shown(capsys, "runs"))
    assert text.isprintable() or set(filter(lambda sign: not sign.isprintable(), text)) == {"\n"}
    assert len(text.splitlines()) == 2 and "\\x1b" in text and "hunter2" not in text


@pytest.mark.parametrize("name", ["config.yaml", "events.jsonl", "result.json", "plan.yaml", "metrics.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 9000,
        "{}\n[]\nnull\n",
        'steps: &a [*a]  # x\n"a": {"event": "evaluated", "eval_loss": "x", "step": -1}',
    ],
)
def test_files_that_are_no_files_of_a_run_break_nothing(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    (made("a") / name).write_text(content)
    made("b", eval_loss=1.0)
    assert sorted(names(shown(capsys, "runs"))) == ["a", "b"]
    assert shown(capsys, "best", "runs")


def test_nothing_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WordsError, match=r"neither outputs nor runs in this folder. Type dtrain runs <folder or URL>"):
        runs.run([])
    with pytest.raises(StoreError, match="there is no such folder"):
        runs.run(["nowhere"])
    for odd in ("x" * 5000, "file://elsewhere/x", "a\0b"):
        with pytest.raises(StoreError):
            runs.run([odd])
        runs.show(odd)
    with pytest.raises(StoreError, match="find runs in memory://nothing/here"):
        runs.run(["memory://nothing/here"])
    with pytest.raises(WordsError, match=r"sorts=: runs does not take it. Did you mean sort"):
        runs.run(["sorts=step"])


def test_rm_asks_and_removes_those_alone(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = made("a"), made("b")
    for answer, there in (("", True), ("no\n", True), ("yes\n", False)):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert runs.run(["rm", "runs/a"]) == int(there)
        assert a.exists() is there and (b / "config.yaml").exists()
    output = capsys.readouterr().out
    assert output.count("Type yes: ") == 3 and output.count("nothing was removed") == 2 and "removed runs/a" in output


def test_rm_refuses_what_is_held_and_what_is_no_run(made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = made("a"), made("b")
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    with lease.hold(str(b)), pytest.raises(LeaseError, match="is being written by a run"):
        runs.run(["rm", "runs/a", "runs/b"])
    with pytest.raises(WordsError, match="runs is not a run"):
        runs.run(["rm", "runs"])
    with pytest.raises(WordsError, match="no run is named"):
        runs.run(["rm"])
    assert (a / "config.yaml").exists() and (b / "config.yaml").exists()


def test_a_run_that_begins_while_rm_asks_is_not_removed(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = made("a")

    class Slow(io.StringIO):
        def readline(self, *_: object) -> str:
            begun.__enter__()
            return "yes\n"

    begun = lease.hold(str(a))
    monkeypatch.setattr("sys.stdin", Slow())
    with pytest.raises(LeaseError, match="is being written by another run"):
        runs.run(["rm", "runs/a"])
    begun.__exit__(None, None, None)
    assert (a / "config.yaml").exists()


@pytest.mark.parametrize("last", range(1, 5))
def test_an_rm_that_was_interrupted_can_be_done_again(
    last: int, made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, real, removed = made("a"), store.remove, list[str]()

    def interrupted(url: str) -> None:
        real(url)
        removed.append(url)
        if len(removed) == last:
            raise StoreError("the storage is gone")

    monkeypatch.setattr(store, "remove", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\nyes\n"))
    with pytest.raises(StoreError):
        runs.run(["rm", "runs/a"])
    monkeypatch.setattr(store, "remove", real)
    assert runs.run(["rm", "runs/a"]) == 0 and not a.exists()


def test_torch_stays_out(made: Callable[..., Path]) -> None:
    made("a")
    code = "import sys; from dtrain.__main__ import main; main(['runs', 'best', 'runs']); sys.exit(bool({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False).returncode == 0


def test_a_run_costs_as_many_reads_however_many_there_are(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcde":
        made(name)
    read: list[str] = []
    real = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, *rest, **more: read.append(self.name * (len(self.parts) == 3)) or real(self, *rest, **more),
    )
    runs.run(["best", "runs"])
    assert read.count("config.yaml") == read.count("events.jsonl") == 5
    assert read.count("plan.yaml") == 1, "the direction of a figure is that of all runs with the same words for it"
    assert not {"metrics.jsonl", "result.json"} & set(read), (
        "of what ended, the step and the figures stand in its last events"
    )


def test_a_sweep_ends_with_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *WORDS, "optim.lr=1e-3,3e-3", "sweep.out=there"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("optim.lr=0.003 · eval_loss " in line for line in lines)
    lines = lines[lines.index("runs below there") :]
    assert sorted(name.rpartition("-")[0] for name in names(lines)) == ["optim.lr-0.001", "optim.lr-0.003"]
    assert "eval_loss" in lines[2] and [line.split()[-1] for line in lines[3:]].count("optim.lr=0.003") == 1


def test_a_folder_is_that_of_a_run_or_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, swept = [*WORDS, "objective=regression"], ["-m", *WORDS, "objective=regression", "optim.lr=1e-3,3e-3"]
    assert main([*swept, "sweep.out=s"]) == main([*words, "out=a"]) == 0
    jobs = sorted(path.name for path in Path("s").glob("optim*"))
    for refused, sentence in (
        ([*words, "out=s"], "out=s: holds a sweep, "),
        ([*swept, "sweep.out=a"], "sweep.out=a: holds a run, "),
        ([*swept, "seed=1", f"sweep.out=s/{jobs[0]}"], "holds a run, "),
    ):
        assert main(refused) == 3
        assert sentence in capsys.readouterr().err
    assert not Path("s/config.yaml").exists() and not [*Path().glob("**/sweep.yaml")][1:]

    for name in ("config.yaml", "plan.yaml"):  # as a folder of an older version may be
        shutil.copy(Path("a", name), Path("s", name))
    assert {*jobs} < {*names(shown(capsys, "s"))}
    assert main(["report", "s", "to=s.html"]) == 0 and all(job in Path("s.html").read_text() for job in jobs)
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    with pytest.raises(WordsError, match=f"s holds more than one run: {jobs[0]}/plan.yaml, .*sweep.yaml"):
        runs.run(["rm", "s"])
    assert [*Path("s").glob("*/config.yaml")]
