"""`dtrain plan -m`: the jobs of a sweep with their predictions."""

import json
import math
from dataclasses import replace

import pytest
from small import composed

from dtrain.__main__ import main
from dtrain.cluster import detect
from dtrain.predict import prediction
from dtrain.predict.prediction import predict
from dtrain.predict.report import count, duration, size
from dtrain.resolve import resolve
from dtrain.tracing import shapes_of

SMALL = ("cluster=h100x8", "nodes=2", "data=synthetic", "data.sequence=4096", "model.layers=32", "model.width=4096", "model.heads=32", "batch=256")  # fmt: skip
SWEPT = ("strategy=fsdp,ddp", "microbatch=1,16")


def test_a_row_is_what_the_plan_of_its_words_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", *SMALL, *SWEPT]) == 0
    counted, heads, *table = capsys.readouterr().out.splitlines()
    assert counted == "4 jobs, of which 1 fit into memory"
    assert [row.split("  ")[-1] for row in table] == [
        f"strategy={name} microbatch={size}" for name in ("fsdp", "ddp") for size in (1, 16)
    ]
    for row in table:
        alone = resolve(composed(*SMALL, *row.split()[-2:]), detect())
        said = predict(alone, shapes_of(alone))
        time = said.time
        assert time
        rates = [duration(time.seconds), count(time.tokens_per_second / 16)]
        shown = [*rates, size(said.memory.peak), "yes" if said.fits else "no"]
        assert " ".join(row.split()[:-2]) == " ".join(shown)
    assert heads.split("  ")[-1] == "words that vary"


def test_speeds_of_different_units_name_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", "data=synthetic", "devices=2", "model=mlp,gpt", "strategy=ddp"]) == 0
    _, heads, first, second = capsys.readouterr().out.splitlines()
    assert "speed" in heads and "samples/s/rank" in first and "tokens/s/rank" in second
    assert main(["plan", "-m", "data=synthetic", "devices=2", "model=mlp", "strategy=ddp,fsdp"]) == 0
    assert "samples/s/rank" in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize("words", [("plan", "json"), ("plan", "json", "-m", "batch=8,16")])
def test_json_has_no_number_without_end(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = prediction.time
    monkeypatch.setattr(prediction, "time", lambda *given: replace(time(*given), seconds=math.inf))
    assert main([*words, "cluster=h100x8"]) == 0
    shown = capsys.readouterr().out
    json.loads(shown, parse_constant=lambda name: pytest.fail(name))
    assert '"seconds": null' in shown


def test_a_table_of_long_words_fits_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = [
        "tensor.sequence=split",
        "tensor.loss=split",
        "mesh.tp=2",
        "strategy=fsdp",
        "pipeline.schedule=1f1b",
        "mesh.pp=2",
    ]
    assert main(["plan", "-m", *SMALL, *words, "optim.weight_decay=0.1,0.2", "schedule.warmup=10,20"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_tools_get_the_words_and_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "json", "-m", *SMALL, "strategy=fsdp,ddp"]) == 0
    jobs = json.loads(capsys.readouterr().out)
    assert [job["words"] for job in jobs] == [["strategy=fsdp"], ["strategy=ddp"]]
    assert jobs[0]["prediction"]["memory"]["peak"] < jobs[1]["prediction"]["memory"]["peak"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "-m: no word has several values."),
        (("seed=1,2", "model=gptt"), "there is no model gptt. Did you mean gpt?"),
        (("optim.lr=interval(1e-4,1e-2)", "sweep.search=random", "sweep.trials=2"), "plan -m: a search draws its jobs"),
        (("seed=1,2", "hydra/sweeper=optuna"), "plan -m: hydra/sweeper=optuna proposes a job after others"),
        (("--why", "seed=1,2"), "plan -m: --why is about one run."),
    ],
)
def test_what_is_no_list_of_jobs_is_one_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-m", "data=synthetic", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert main(["plan", "best", "-m", "seed=1,2"]) == 2
