"""A run that a job serves: the command submits and follows, the job takes the lease and runs the saved plan alone."""

import json
import os
from pathlib import Path

import commands
import pytest
from killing import leavings
from launching import WORDS, plan_of, steps_of

from dtrain.errors import PreflightError, RankError, StoreError
from dtrain.launcher import detached
from dtrain.planned import Plan


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    made = plan_of(tmp_path / "run", "nodes=2", "devices=2")
    for name, value in detached.write(made).items():
        monkeypatch.setenv(name, value)
    return made


def words(out: Path, *more: str) -> list[str]:
    own = ["trust=[launching,queued]", "launcher._target_=queued.Queued", f"launcher.note={out.with_name('note')}"]
    return [*WORDS, "model=mlp", *own, f"out={out}", *more]


def ran(*words: str, **environment: str) -> "tuple[int, str]":
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}", **environment}
    done = commands.run(*words, env=env)
    return done.returncode, done.stdout + done.stderr


def test_the_job_runs_the_saved_plan_and_a_second_start_says_that_it_has_finished(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, text = ran(*words(out, "nodes=2", "devices=2"))
    assert code == 0, text
    assert steps_of(out) == list(range(1, 13))
    leases = [json.loads(path.read_text()) for path in (out / "lease").iterdir()]
    assert [lease["state"] for lease in leases] == ["released"]
    command, environment = (tmp_path / "note").read_text().split("\nDTRAIN_SECRET=")
    assert command.split("\n")[1:] == ["-m", "dtrain", "run", str(out)]
    code, text = ran("run", str(out), DTRAIN_SECRET=environment.split("\n")[0])
    assert (code, text.count("already finished")) == (0, 1), text
    secret = environment.split("\n")[0]
    assert not [path for path in out.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    code, text = ran(*WORDS, "model=mlp", f"out={tmp_path / 'local'}", "nodes=2", "devices=2")
    assert code == 0, text
    assert leavings(out) == leavings(tmp_path / "local")


@pytest.mark.campaign("commands")
def test_the_traceback_of_a_rank_in_the_job_is_the_commands(tmp_path: Path) -> None:
    code, text = ran(
        *words(tmp_path / "run", "model._target_=launching.Raises", "model.rank=0", "nodes=2", "devices=1")
    )
    assert code == 1
    assert "ValueError: planned" in text.split("dtrain: ")[-1]


def test_the_plan_comes_back_whole(plan: Plan) -> None:
    again = detached.read(plan.out)
    assert again == plan
    assert again.to_dict() == json.loads(json.dumps(plan.to_dict()))


def test_a_plan_that_was_changed_is_not_run(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(plan.out) / "submitted.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "plan": saved["plan"].replace('"steps": 12', '"steps": 13')}))
    with pytest.raises(PreflightError, match="another DTRAIN_SECRET"):
        detached.read(plan.out)
    path.write_text("{")
    with pytest.raises(StoreError, match="it is damaged"):
        detached.read(plan.out)
    monkeypatch.delenv("DTRAIN_SECRET")
    with pytest.raises(PreflightError, match=r"type dtrain recipe=.*/config.yaml out="):
        detached.read(plan.out)


def test_a_third_start_at_the_same_step_is_the_last(plan: Plan) -> None:
    detached.note_start(plan.out)
    detached.note_start(plan.out)
    with pytest.raises(RankError, match="the last two starts of this job ended at step 0, where they began"):
        detached.note_start(plan.out)
    folder = Path(plan.out, "checkpoints", "step-00000007", "00000002-20260101T000000-0123abcd-0001")
    folder.mkdir(parents=True)
    (folder / "COMMIT.json").write_text("{}")
    detached.note_start(plan.out)
    assert json.loads(Path(plan.out, "starts.json").read_text())["steps"] == [0, 0, 0, 7]


def test_the_cause_of_the_starts_before_is_quoted(plan: Plan) -> None:
    for _ in range(2):
        detached.note_start(plan.out)
        facts = {"kind": "killed", "rank": 3, "message": "rank 3 was killed: SIGKILL.", "exit_code": 1}
        Path(plan.out, "failure.json").write_text(json.dumps(facts))
    with pytest.raises(RankError, match=r"ended at step 0, where they began\. rank 3 was killed: SIGKILL\.") as third:
        detached.note_start(plan.out)
    assert third.value.facts["rank"] == 3 and third.value.exit_code == 4


@pytest.mark.campaign("commands")
@pytest.mark.parametrize(("fault", "code"), [("launching.Raises", 4), ("launching.KilledAlways", 1)])
def test_a_job_says_by_its_exit_code_whether_another_start_would_fail_alike(
    fault: str, code: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    failed, text = ran(*words(out, f"model._target_={fault}", "model.rank=1", "nodes=1", "devices=2"))
    assert failed == 1, text
    secret = (tmp_path / "note").read_text().partition("\nDTRAIN_SECRET=")[2].split("\n")[0]
    assert ran("run", str(out), DTRAIN_SECRET=secret)[0] == code
    cause = json.loads((out / "failure.json").read_text())["message"]
    assert ran("run", str(out), DTRAIN_SECRET=secret)[0] == 4
    facts = json.loads((out / "failure.json").read_text())
    assert facts["message"].endswith(cause) and "the last two starts of this job ended at step 0" in facts["message"]


def test_the_end_of_a_log_that_grows_fast_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(detached, "MOST_BYTES", 64)
    path = tmp_path / "log"
    log, text = detached._Log(path), "".join(f"line {number}\n" for number in range(100)) + "a" * 200 + "\nthe end\n"
    path.write_text(text + "not yet wh")
    log.show()
    assert capsys.readouterr().out == text
    path.write_text("again\n")
    log.show()
    assert capsys.readouterr().out == "again\n"


@pytest.mark.parametrize(
    "noted",
    [
        {},
        {"launcher": {"_target_": "dtrain.storage.store.remove", "url": "."}, "job": "1"},
        {"launcher": {"_target_": "os.system", "command": "touch x"}, "job": "1"},
        {"launcher": {"_target_": "dtrain.launcher.slurm.Slurm"}, "job": ["--user=root"]},
    ],
)
def test_stop_builds_nothing_that_somebody_wrote_under_out(noted: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "engine.json").write_text(json.dumps(noted))
    code, text = ran("stop", str(tmp_path / "run"))
    assert code == 2 and "stop: " in text, text
    assert (tmp_path / "run" / "engine.json").exists()
