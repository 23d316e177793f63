"""`<sweep>/best` is the finished job with the best metric of the sweep, and a recipe."""

import json
from pathlib import Path

import pytest
from reported import job

import dtrain
from dtrain.__main__ import main
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.recipe import locate
from dtrain.report import best
from dtrain.sweep import jobs
from dtrain.sweep.study import Study

SWEEP = "format: 1\nwords: {{}}\nspaces: [{{optim.lr: [1, 2, 3]}}]\nstudy: {{metrics: {}, goals: {}}}\n"


def sweep(root: Path, metrics: str = "[eval_loss]", goals: str = "[min]", status: str = "finished") -> str:
    """Three jobs: lr=1 has the lowest loss, lr=2 the highest; that of lr=0, which is lower, has not finished."""
    for lr, loss in ((0, 0.1), (1, 1.0), (2, 3.0), (3, 2.0)):
        end = {
            "status": status if lr else "stopped",
            "step": 2,
            "loss": -loss,
            "wall_seconds": 1.0,
            "metrics": {"eval_loss": loss},
        }
        job(root / f"lr-{lr}", str(lr), eval_loss=loss, files={"result.json": json.dumps(end)})
    (root / "sweep.yaml").write_text(SWEEP.format(metrics, goals))
    return str(root)


@pytest.mark.parametrize(
    ("metrics", "goals", "name"),
    [
        ("[eval_loss]", "[min]", "lr-1"),
        ("[eval_loss]", "[max]", "lr-2"),
        ("[loss]", "[min]", "lr-2"),
        ("[]", "[]", "lr-1"),
        ("7", "{", "lr-1"),
    ],
)
def test_the_metric_of_the_sweep_decides(metrics: str, goals: str, name: str, tmp_path: Path) -> None:
    root = sweep(tmp_path / "s", metrics, goals if goals != "{" else "null")
    assert best.job(root) == f"{root}/{name}"


def test_the_best_value_of_a_job_counts_where_that_is_asked(tmp_path: Path) -> None:
    root = sweep(tmp_path / "s")
    result = tmp_path / "s" / "lr-2" / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "best": {"eval_loss": {"value": 0.5, "step": 1}}}))
    assert best.job(root) == f"{root}/lr-2"


def test_a_result_that_is_damaged_is_none(tmp_path: Path) -> None:
    root = sweep(tmp_path / "s")
    for text in (
        "[",
        "{}",
        '{"status": "finished", "step": 1, "loss": null, "wall_seconds": 1, "metrics": {"eval_loss": "low"}}',
    ):
        (tmp_path / "s" / "lr-1" / "result.json").write_text(text)
        assert best.job(root) == f"{root}/lr-3"


def test_it_is_a_recipe_and_says_which_job_it_is(tmp_path: Path) -> None:
    root = sweep(tmp_path / "s")
    config = compose([f"recipe={root}/best"])
    assert (config.steps, config.optim["lr"]) == (10, 1)
    assert config.sources["optim.lr"] == f"{root}/lr-1/config.yaml:5"
    assert locate.find("digits/best").url == "digits/best", "where there is no sweep, the word means what it says"


def test_a_sweep_over_the_best_job_of_another_one_keeps_to_that_job(tmp_path: Path) -> None:
    root = sweep(tmp_path / "s")
    description = jobs.read([f"recipe={root}/best", "seed=0,1", f"sweep.out={tmp_path}/t"]).description(Study(), {})
    assert description.words["recipe"] == f"{root}/lr-1/config.yaml"


def test_what_has_no_best_job_is_told(tmp_path: Path) -> None:
    with pytest.raises(WordsError, match="no job of this sweep has finished with the metric eval_loss yet"):
        best.job(sweep(tmp_path / "a", status="stopped"))
    with pytest.raises(WordsError, match="2 metrics, and so no best job"):
        best.job(sweep(tmp_path / "b", "[eval_loss, loss]", "[min, min]"))
    assert best.job(str(tmp_path)) is None


def test_whatever_reads_a_run_reads_the_best_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=mlp", "data=synthetic", "data.samples=256", "objective=regression", "steps=4", "logger=[]"]
    assert main(["-m", *words, "optim.lr=1e-9,1e-2", "sweep.out=s"]) == 0
    (name,) = [path.name for path in Path("s").glob("optim.lr-0.01*")]
    capsys.readouterr()
    for place in ("out=s/best", "out=s/best/", "init=s/best"):
        assert main(["evaluate", place, "launcher=inline"]) == 0
        (Path("s") / name / "evaluate.json").unlink()
    assert main(["checkpoint", "ls", "out=s/best"]) == 0
    assert "newest" in capsys.readouterr().out
    assert main(["checkpoint", "export", "out=s/best", "to=export"]) == 0
    alone, best_of_all = dtrain.load(f"s/{name}").state_dict(), dtrain.load("s/best").state_dict()
    assert all(bool((best_of_all[key] == alone[key]).all()) for key in alone)
