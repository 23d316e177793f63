"""The best by a metric is saved at the step where it was measured, and found again by its name."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pool import RankFailed, ranks
from servers import moto
from small import plan

import dtrain
from dtrain.__main__ import main
from dtrain.errors import StoreError
from dtrain.hook import StepInfo
from dtrain.planned import Plan
from dtrain.storage import store
from dtrain.storage.attempts import listed
from dtrain.train import train

VALUES = {1: 0.1, 2: 0.5, 3: 0.5, 4: 0.2, 5: 0.7, 6: 0.3, 7: 0.7, 8: 0.0}
PLAIN = ("model=mlp", "data=synthetic", "objective=regression", "logger=[]")
WORDS = (
    *PLAIN, "steps=8", "evaluate.every=0", "trust=[checkpoint]",
    "hook.score._target_=checkpoint.test_scores.Score", "checkpoint.best=eval_score", "checkpoint.every=4", "checkpoint.keep=1",
    "checkpoint.best_is=highest",
)  # fmt: skip


class Score:
    """A figure that is known beforehand, which only rank 0 gives."""

    every = 1

    def __call__(self, info: StepInfo) -> Mapping[str, Any]:
        return {"score": VALUES[info.step]} if os.environ.get("RANK", "0") == "0" else {}


def killed(asked: Plan, name: str) -> Any:
    """The process ends as it begins to write a file of this name for step 5."""
    for act in ("put", "publish"):
        write = getattr(store, act)

        def end(url: str, *arguments: Any, write: Any = write, **options: Any) -> None:
            if "step-00000005" in url and name in url:
                os._exit(9)
            write(url, *arguments, **options)

        setattr(store, act, end)
    return train(asked)


def steps(out: Path) -> list[int]:
    return sorted(one.step for one in listed(str(out)) if one.is_committed)


@pytest.mark.parametrize("words", [(), ("strategy=fsdp", "devices=2")])
def test_the_best_is_saved_where_it_was_measured_and_stays(words: tuple[str, ...], tmp_path: Path) -> None:
    """At no step of `checkpoint.every`; of equal ones the first."""
    asked = plan(*WORDS, *words, f"out={tmp_path}")
    result = ranks(asked.world, train, asked)[0]
    assert result.best == {"eval_score": {"value": 0.7, "step": 5}}
    assert json.loads((tmp_path / "result.json").read_text())["best"] == result.best
    assert steps(tmp_path) == [5, 8]


def test_a_lower_value_is_the_best_of_a_loss(tmp_path: Path) -> None:
    asked = plan(*WORDS[:-1], "checkpoint.best_is=lowest", "stop_after=7", f"out={tmp_path}")
    (result,) = ranks(1, train, asked)
    assert (result.best["eval_score"]["step"], steps(tmp_path)) == (1, [1, 7])


@pytest.mark.parametrize("name", ["safetensors", "METRICS.json", "COMMIT.json"])
def test_a_kill_between_the_evaluation_and_the_save_loses_no_best(name: str, tmp_path: Path) -> None:
    words = (*WORDS, f"out={tmp_path}")
    ranks(1, train, plan(*words, "stop_after=4"))
    assert steps(tmp_path) == [2, 4]
    with pytest.raises(RankFailed):
        ranks(1, killed, plan(*words), name)
    assert steps(tmp_path) == [2, 4], "the old one stays until the new one is committed"
    (result,) = ranks(1, train, plan(*words))
    assert result.best == {"eval_score": {"value": 0.7, "step": 5}}
    assert steps(tmp_path) == [5, 8]


def test_a_best_whose_save_failed_is_not_named(tmp_path: Path) -> None:
    """The next best one is saved instead."""

    def full(asked: Plan) -> Any:
        put = store.put

        def fail(url: str, *arguments: Any) -> None:
            if "step-00000005" in url:
                raise StoreError("the disk is full")
            put(url, *arguments)

        store.put = fail
        return train(asked)

    (result,) = ranks(1, full, plan(*WORDS, "checkpoint.mode=blocking", f"out={tmp_path}"))
    assert result.best == {"eval_score": {"value": 0.7, "step": 7}}
    assert steps(tmp_path) == [7, 8]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        with moto() as server:
            yield f"{server.url}/best"
    else:
        yield str(tmp_path / "run")


@pytest.mark.parametrize("place", ["disk", pytest.param("s3", marks=pytest.mark.campaign("network"))], indirect=True)
def test_the_name_of_the_best_is_a_place_for_whatever_reads_a_checkpoint(
    place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        main([*PLAIN, "steps=8", "optim.lr=0.3", "evaluate.every=1", "checkpoint.best=eval_loss", f"out={place}"]) == 0
    )
    assert re.search(r", best loss 1\.\d+ of step 1 ", capfd.readouterr().out)
    best = dtrain.load(f"{place}/best").state_dict()
    assert any((weight != best[name]).any() for name, weight in dtrain.load(place).state_dict().items())
    for words in (["evaluate", f"out={place}/best"], ["evaluate", f"init={place}/best"],
                  ["predict", f"out={place}/best", f"predict.to={tmp_path}/p.jsonl"],
                  ["checkpoint", "export", f"out={place}/best", f"to={tmp_path}/exported"]):  # fmt: skip
        assert main(words) == 0
        assert capfd.readouterr().out.splitlines()[-1 if words[0] != "checkpoint" else 0].startswith("step 1 ")
    assert main([*PLAIN, "steps=1", "optim.lr=0", f"init={place}/best", f"out={tmp_path}/tuned"]) == 0
    tuned = dtrain.load(tmp_path / "tuned").state_dict()
    assert all((weight == best[name]).all() for name, weight in tuned.items())


def test_the_best_of_a_run_elsewhere_is_read_without_the_hook_that_measured_it() -> None:
    """Whose code a remote run may not bring."""
    assert main([*WORDS, "out=memory://scored"]) == 0
    best = dtrain.load("memory://scored/best").state_dict()
    assert any((weight != best[name]).any() for name, weight in dtrain.load("memory://scored").state_dict().items())


def test_a_run_without_a_best_says_what_to_type(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAIN, "steps=1", f"out={tmp_path}/run"]) == 0
    for words in (["evaluate", f"out={tmp_path}/run/best"], [*PLAIN, f"init={tmp_path}/run/best", f"out={tmp_path}/b"]):
        assert main(words) != 0
        assert "the run has no checkpoint.best. Type" in capfd.readouterr().err
