"""`dtrain report`: the jobs, figures, causes and commands of what lies in a folder, also of what is damaged or hostile."""

import json
from pathlib import Path

import commands
import fsspec
import pytest
from reported import data, job, many, shown

from dtrain.errors import StoreError, WordsError
from dtrain.storage import store
from dtrain.verb import report

SMALL = ["model=mlp", "data=synthetic", "data.samples=64", "objective=regression", "steps=4", "hook=[]", "logger=[]"]


def test_a_sweep_as_it_ran(tmp_path: Path) -> None:
    swept = commands.run("-m", *SMALL, "optim.lr=1e-3,1e-2", "seed=0,1", "sweep.out=s", cwd=tmp_path)
    assert swept.returncode == 0, swept.stderr
    done = commands.run("report", "s", cwd=tmp_path)
    assert done.returncode == 0 and "wrote s/report.html" in done.stdout, done.stderr
    page = data((tmp_path / "s" / "report.html").read_text())
    assert (page["kind"], page["keys"], page["asked"], page["causes"]) == ("sweep", ["optim.lr", "seed"], 4, [])
    assert sorted(zip(*page["values"], strict=True)) == [(0.001, 0), (0.001, 1), (0.01, 0), (0.01, 1)]
    for each in page["jobs"]:
        result = json.loads((tmp_path / "s" / each["name"] / "result.json").read_text())
        assert (each["status"], each["step"], each["loss"][:2]) == ("finished", 4, [1, 4])
        assert each["figures"] == [
            pytest.approx(result["metrics"]["eval_loss"], rel=1e-4),
            pytest.approx(result["loss"], rel=1e-4),
        ]
        assert each["heldout"]["eval_loss"][0] == [4]
    [(_, again), *_] = page["commands"]
    assert commands.run(*again.removeprefix("python -m dtrain ").split(), cwd=tmp_path).stdout.startswith(
        "4 jobs in s, of which 4 are finished"
    )


def test_a_run_on_one_axis(tmp_path: Path) -> None:
    events = [
        {"time": 100.0, "event": "started", "step": 0},
        {"time": 104.0, "event": "committed", "step": 4, "stall_seconds": 0.25},
        {"time": 200.0, "event": "restarted", "reason": "a node was lost"},
        {"time": 201.0, "event": "started", "step": 4},
        {"time": 202.0, "event": "spike", "step": 5, "why": "the loss is nan", "answer": "skip"},
        {"time": 205.0, "event": "finished", "step": 8},
    ]
    place = job(
        tmp_path / "a",
        "0.1",
        losses=[8.0, 7, 6, 5, 4, 3, 2, 1],
        files={"events.jsonl": "".join(json.dumps(each) + "\n" for each in events)},
    )
    page = shown(place)
    columns = {each["name"]: (each["group"], each["means"]) for each in page["columns"]}
    assert columns["loss"] == ("loss", [8, 7, 6, 5, 4, 3, 2, 1])
    assert [columns[name][0] for name in ("lr", "norm", "samples_per_second", "peak_bytes")] == [
        "rate",
        "norm",
        "speed",
        "memory",
    ]
    assert page["times"] == [1, 2, 3, 4, 102, 103, 104, 105]
    assert [(mark["kind"], mark["step"]) for mark in page["marks"]] == [
        ("started", 0), ("committed", 4), ("restarted", 4), ("started", 4), ("spike", 5), ("finished", 8),
    ]  # fmt: skip
    assert (
        page["marks"][2]["text"] == "a node was lost" and page["marks"][4]["text"] == "the loss is nan, on_spike=skip"
    )
    assert ["optim.lr", "0.1"] in page["words"] and ["device", "cpu"] in page["plan"]


def test_failures_are_counted_by_cause(tmp_path: Path) -> None:
    for number in range(4):
        job(tmp_path / "s" / f"good-{number}", f"0.{number + 1}", eval_loss=number + 1.0)
    for number in range(3):
        reason = {
            "status": "spiked",
            "step": 2,
            "loss": 9.0,
            "wall_seconds": 1.0,
            "reason": f"step {number}: the loss is nan (samples {number}).",
        }
        spiked = job(
            tmp_path / "s" / f"spiked-{number}",
            "9",
            eval_loss=0.5,
            status="spiked",
            files={"result.json": json.dumps(reason)},
        )
        (spiked / "events.jsonl").write_text(
            (spiked / "events.jsonl").read_text().replace('"loss": 2.0', f'"reason": "{reason["reason"]}"')
        )
    job(
        tmp_path / "s" / "raised",
        "8",
        status="failed",
        eval_loss=None,
        files={"failure.json": '{"error": "ValueError: planned", "traceback": "a\\nb"}'},
    )
    job(tmp_path / "s" / "never", "7", status="", eval_loss=None, files={"events.jsonl": ""})
    page = shown(tmp_path / "s")
    names = [each["name"] for each in page["jobs"]]
    causes = {cause["text"]: [names[number] for number in cause["jobs"]] for cause in page["causes"]}
    assert list(causes.values()) == [["spiked-0", "spiked-1", "spiked-2"], ["raised"]]
    assert [cause["trace"] for cause in page["causes"]] == ["", "a\nb"]
    assert {each["name"]: each["status"] for each in page["jobs"]}["never"] == "new"
    assert [each["name"] for each in page["figures"]] == ["eval_loss", "loss"]
    assert page["keys"] == ["optim.lr"] and page["words"][0] == ["model", "mlp"]


HOSTILE = {
    "config.yaml": "\x00</script><b>\n  &a: *a\n  lr: </script>  # command line\n" + "x: [" * 5000, "metrics.jsonl": '{"step": 1, "loss": 1e999}\n{"step":',
    "events.jsonl": '{"event": "evaluated", "step": 1, "eval_</script>": 1.0}\n{"event": ["x"]}\n{"time": "\\u001b", "event": "failed"}\n',
    "result.json": "[", "failure.json": '{"error": {"a": 1}, "traceback": "</script>\\u0000"}', "plan.yaml": "a: &b [*b]\n",
}  # fmt: skip


def test_damaged_and_hostile_files_are_shown_as_what_they_are(tmp_path: Path) -> None:
    root = tmp_path / "s"
    job(root / "a", "0.1")
    job(root / "</script><script>alert(1)", "0.2", status="failed", files=HOSTILE)
    (root / "b\nc").mkdir()
    (root / "b\nc" / "config.yaml").mkdir()
    job(root / "$(touch x)'\x1b[0m", "${oc.env:HOME}")
    (root / "sweep.yaml").write_text(
        "format: 1\nwords: {data.x: '$(touch x) </script>'}\nspaces: [{optim.lr: [0.1, '</script>']}]\n"
    )
    page = shown(root)
    jobs = {each["name"]: each["status"] for each in page["jobs"]}
    assert jobs == {"a": "finished", "</script><script>alert(1)": "failed", "$(touch x)'\\x1b[0m": "finished"}
    assert "'data.x=$(touch x) </script>'" in page["commands"][0][1], "a shell takes it for one word"
    assert (root / "report.html").read_text().count("</script>") == 2


def test_secrets_are_masked(tmp_path: Path) -> None:
    key = "ghp_" + "a1B2" * 10
    events = json.dumps({"time": 1.0, "event": "caveat", "text": f"token {key}"}) + "\n"
    job(
        tmp_path / "s" / "a",
        key,
        status="failed",
        files={"failure.json": json.dumps({"error": f"bad {key}", "traceback": key}), "events.jsonl": events},
    )
    job(tmp_path / "s" / "b", "0.1", files={"plan.yaml": f"x: {key}\nlogger: {{w: {{api_key: abcdef123456}}}}\n"})
    for place in (tmp_path / "s", tmp_path / "s" / "a", tmp_path / "s" / "b"):
        shown(place)
        text = (place / "report.html").read_text()
        assert key not in text and "abcdef123456" not in text and "***" in text


def test_it_is_written_where_it_is_asked_for_and_replaces_only_reports(tmp_path: Path) -> None:
    place = job(tmp_path / "a", "0.1")
    shown(place, f"to={tmp_path}/deep/page.html")
    shown(place, f"to={tmp_path}/deep/page.html")
    (tmp_path / "mine.py").write_text("print()")
    with pytest.raises(WordsError, match="is no report"):
        report.run([str(place), f"to={tmp_path}/mine.py"])
    assert (tmp_path / "mine.py").read_text() == "print()"
    for words in ([], [str(place), str(place)], [str(place), "to="], ["to=x.html"]):
        with pytest.raises(WordsError, match="report <a run"):
            report.run(words)
    for missing in (tmp_path / "none", tmp_path / "deep"):
        with pytest.raises(StoreError, match="there is no"):
            report.run([str(missing)])


def test_a_sweep_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job(tmp_path / "s" / "a", "0.1", losses=[1.0] * 3000)
    job(tmp_path / "s" / "b", "0.2")
    files = fsspec.filesystem("memory")
    files.put(str(tmp_path / "s"), "/reports/s", recursive=True)
    assert report.run(["memory://reports/s"]) == 0
    [written] = tmp_path.glob("*.html")
    page = data(written.read_text())
    assert [each["name"] for each in page["jobs"]] == ["a", "b"] and page["jobs"][0]["loss"][:2] == [1, 3000]


def test_a_job_takes_less_than_three_kilobytes(tmp_path: Path) -> None:
    many(tmp_path / "s", 100)
    page = shown(tmp_path / "s")
    assert len(page["jobs"]) == 100
    assert store.size(str(tmp_path / "s" / "report.html")) < 100 * 2_900
