"""The command, as it is typed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chat import talks
from commands import COMMAND, Forked

from dtrain import tracing
from dtrain.__main__ import main
from dtrain.verb import shapes

BIG = [
    "model.layers=80",
    "model.width=8192",
    "model.heads=64",
    "model.kv_heads=8",
    "model.hidden=28672",
    "model.vocab=128256",
    "data=synthetic",
    "data.sequence=8192",
    "data.vocab=128256",
    "strategy=fsdp",
    "mesh.tp=8",
    "mesh.pp=4",
    "pipeline.schedule=interleaved_1f1b",
    "precision=bf16",
    "remat=full",
    "cluster=h100x8",
]


def test_a_plan_for_a_cluster_says_what_it_needs_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BIG, "nodes=128", "batch=2048", "microbatch=1"]) == 0
    output = capsys.readouterr().out
    for name in ("memory", "work", "collectives", "time", "pipeline", "placement"):
        assert f"\n{name} " in output, name
    assert "70.6B parameters" in output


def test_data_that_is_not_on_this_machine_is_refused_and_of_another_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "model=mlp", "data=csv", "data.path=nosuch.csv", "data.targets=y", "objective=regression"]
    assert main(words) == 3
    assert "data.path=nosuch.csv: no file is there." in capsys.readouterr().err
    assert main([*words, "cluster=h100x8"]) == 0


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("", []),
        ("evaluate.every=0", ["evaluate    every=0 samples=256"]),
        ("evaluate.samples=null", ["evaluate    every=200 samples=null"]),
        (
            "evaluate.every=5 evaluate.metrics=[f1,top5] evaluate.sets.dev.samples=64 stop.metric=eval_f1",
            [
                "evaluate    every=5 samples=256 metrics=[f1,top5] sets=[dev]",
                "stop        metric=eval_f1 patience=5 least=0.0",
            ],
        ),
        ("checkpoint.best=eval_loss", ["best=eval_loss"]),
    ],
)
def test_what_was_asked_of_the_evaluation_is_shown_and_nothing_else(
    words: str, rows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["model=mlp", "data=synthetic", "data.outputs=8", "objective=classification", *words.split()]
    assert main(["plan", *asked]) == 0
    shown = capsys.readouterr().out
    assert all(row in shown for row in rows)
    assert [line[:8] for line in shown.splitlines() if line.startswith(("evaluate", "stop"))] == [
        row[:8] for row in rows if not row.startswith("best")
    ]


SYNTHETIC = "data=synthetic"
B8 = f"{SYNTHETIC} data.sequence=8192 data.vocab=128256 model.layers=32 model.width=4096 model.heads=32 model.kv_heads=8 model.hidden=14336 precision=bf16 strategy=fsdp batch=64"
WIDE = (
    SYNTHETIC, "data=synthetic model=mlp objective=regression", "data=synthetic model=cnn objective=classification data.inputs=[3,16,16]", "data=synthetic devices=2 strategy=ddp optim=muon ema=0.99",
    f"{B8} cluster=h100x8 nodes=2 microbatch=1 remat=selective", " ".join([*BIG, "nodes=128 batch=2048 microbatch=1 cluster=a100x8 tensor.sequence=split tensor.loss=split"]),
    f"{' '.join(BIG)} strategy=zero2 mesh.pp=16 pipeline.schedule=1f1b cluster=b200x8 nodes=16 batch=512 microbatch=1", f"{B8} model=moe model.hidden=null cluster=h200x8 nodes=4 mesh.ep=8 microbatch=1",
    f"{B8} data.sequence=131072 cluster=b200x8 nodes=4 mesh.cp=8 remat=full", f"{B8} cluster=mi300x8 nodes=64 strategy=hsdp batch=1024", f"{B8} cluster=h100x8 nodes=8 strategy=auto batch=512",
    f"{B8} cluster=l40sx8 strategy=zero3 microbatch=1 remat=full", f"{B8} cluster=a100x8 strategy.offload=cpu microbatch=1", f"{B8} cluster=h100x8 microbatch=8", f"{' '.join(BIG)} strategy=zero3 cluster=a100x8 nodes=4 batch=256 microbatch=8",
    f"{SYNTHETIC} adapter=lora adapter.targets=[q,k,v,out,gate,up,down] optim.lr_of={{lora:0.1}}", f"{SYNTHETIC} devices=2 strategy=ddp out={'a/folder_with_a_long_name/' * 8}run", f"{SYNTHETIC} cluster=h100x8 nodes=2:4 strategy=fsdp batch=96 out=/shared/run",
    f"{SYNTHETIC} cluster=h100x8 nodes=2 strategy=fsdp batch=96 launcher=slurm launcher.partition=long launcher.time=1-00:00:00 out=/shared/run",
    "objective=next_token data=mixture data.of.web.data=text data.of.web.path=conf/config.yaml data.of.code.data=text data.of.code.path=conf/config.yaml data.weights={web:0.7,code:0.3}",
)  # fmt: skip
"""One plan of each kind; another one is of a folder of Hugging Face."""


def fits_a_pipe(printed: str) -> None:
    """No row is wider than 100 columns, nor shows a mapping as Python does, and all begin as they would on one line. A
    script is shown as it is.
    """
    assert max(map(len, printed.splitlines())) <= 100
    printed = re.sub(r"(?ms)^launch +#!/bin/bash.*?^exit [^\n]*\n\n", "", printed)
    assert not re.search(r"[{}]|None|True|False|_about_", printed)
    assert all(line[11] == " " for line in printed.splitlines() if not line.startswith("digest"))


@pytest.mark.parametrize("words", WIDE)
def test_a_plan_is_no_wider_than_a_pipe_is_said_to_be(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["plan", *words.split()]) == 0
    fits_a_pipe(capsys.readouterr().out)


def test_a_plan_of_a_model_of_transformers_is_no_wider(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 259,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes})
    )
    words = [
        f"model.name={tmp_path}",
        "model.weights=random",
        "data=text",
        f"data.path={tmp_path}/config.json",
        "devices=2",
        "strategy=fsdp",
    ]
    with Forked([*COMMAND, "plan", "model=hf", *words], stdout=subprocess.PIPE, text=True) as command:
        printed, _ = command.communicate(timeout=300)
    assert command.returncode == 0
    fits_a_pipe(printed)


def test_parts_of_parts_are_shown_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WIDE[-1].split(), "optim.betas=[0.8,0.9]"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of.code=text of.code.path=conf/config.yaml" in shown and "weights.web=0.7 weights.code=0.3" in shown
    assert "betas=[0.8,0.9]" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("steps=20", "warm-up     takes all of the 20 steps. Type schedule.warmup=0.1"),
        ("steps=80 schedule=constant", "takes 50 of the 80 steps"),
        ("steps=100", ""), ("steps=20 schedule.warmup=0.9", ""), ("steps=1 schedule.warmup=1", ""),
    ],
)  # fmt: skip
def test_a_warm_up_that_takes_most_of_a_short_run_is_told(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 0
    shown = capsys.readouterr().out
    assert said in shown if said else "warm-up  " not in shown


def test_speed_and_room_of_a_gpu_stand_there(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BIG, "nodes=128", "batch=2048", "microbatch=1"]
    assert main(["plan", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert main(["plan", "json", *words]) == 0
    prediction = json.loads(capsys.readouterr().out)["prediction"]
    time, left = prediction["time"], prediction["budget"] - prediction["memory"]["peak"]
    assert f"{time['tokens_per_second'] / 1024:.3g} tokens/s/GPU, {time['mfu'] * 989.4:.0f} TFLOP/s/GPU" in shown
    assert f"headroom {left / 2**30:.3g} GiB" in shown


@pytest.mark.parametrize("columns", [80, 120])
def test_pictures_are_as_wide_as_the_screen(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    layers = ["model.layers=16", "mesh.pp=16", "pipeline.schedule=1f1b"]
    assert main(["plan", *BIG, *layers, "nodes=16", "batch=64", "microbatch=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    drawn = [line for line in lines if line[12:14].strip().isdigit() and "·" in line]
    assert len(drawn) == 16
    assert columns - 25 < max(map(len, drawn)) <= columns


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("launcher=kubernetes", "launcher.image=train:1", "out=s3://bucket/run"), "kind: Job"),
        (("launcher=slurm",), "#SBATCH --gpus-per-node=8"),
        (("launcher=ssh", "launcher.hosts=[gpu1,gpu2]", "out=s3://bucket/run"), "gpu1"),
        (("launcher=mpi",), "mpirun"),
        (("launcher=local",), "not from here: this host has no GPU"),
    ],
)
def test_what_launches_ranks_elsewhere_is_shown_on_a_host_without_gpus(
    words: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("model=mlp", "data=synthetic", "objective=regression", "strategy=fsdp", "batch=64")
    assert main(["plan", "cluster=h100x8", "nodes=2", "devices=8", *small, *words]) == 0
    launch = capsys.readouterr().out.partition("\nlaunch ")[2].partition("\nout ")[0]
    assert shown in launch, launch


def test_a_plan_shows_the_launcher_that_has_started_this_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "4")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    small = ("model=mlp", "data=synthetic", "objective=regression", "strategy=ddp", "batch=64")
    assert main(["plan", *small, "backend=mpi"]) == 0
    assert "\nlaunch      mpirun -np 4 python -m dtrain <the same words>\n" in capsys.readouterr().out


def test_the_same_for_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "json", "model=mlp", "data=synthetic", "devices=2", "strategy=ddp"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["mesh"]["dp_replicate"] == 2
    assert document["prediction"]["calls"][0]["kind"] == "all_reduce"
    assert document["changes"] == []


def test_what_does_not_fit_is_said_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    small = "model.layers=32 model.width=4096 model.heads=32 model.hidden=14336 data=synthetic data.sequence=8192 strategy=fsdp precision=bf16 cluster=h100x8"
    assert main(["plan", *small.split(), "batch=64", "microbatch=8"]) == 0
    output = capsys.readouterr().out
    assert "DOES NOT FIT" in output
    assert 1 <= output.count("\ntry ") <= 3
    assert re.search(r"\(of 75 GiB\), \d+ GiB too much", output)


def test_predictions_need_no_torch() -> None:
    code = f"import sys\nfrom dtrain.__main__ import main\ncode = main(['plan', *{BIG!r}, 'nodes=16', 'batch=64'])\nsys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("search", [(), ("devices=2",), ("best", "json", "devices=2")], ids=["one", "auto", "best"])
def test_a_plan_says_before_it_runs_code_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], search: tuple[str, ...]
) -> None:
    shapes._announce.cache_clear()
    monkeypatch.setattr(tracing, "_traced", {})
    monkeypatch.delitem(sys.modules, "said_first", raising=False)
    (tmp_path / "said_first.py").write_text(
        "import sys, torch\nprint('IT RUNS', file=sys.stderr)\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(4, 1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = [
        "model._target_=said_first.Net",
        "data=synthetic",
        "objective=regression",
        "data.inputs=[4]",
        "data.outputs=1",
        "trust=[said_first]",
    ]
    assert main(["plan", *search, *own]) == 0
    errors = capsys.readouterr().err
    assert errors.index("note: planning runs code of said_first") < errors.index("IT RUNS")
    assert main(["plan", "model=mlp", "data=synthetic", "objective=regression", "trust=[said_first]"]) == 0
    assert "runs code" not in capsys.readouterr().err, "a model of ours is known without running anything"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model._target_=mypkg.Net", "trust=[mypkg]"), "mypkg.Net: cannot be imported: No module named 'mypkg'. Is "),
        (("model=hf", "model.name=./lama"), "model.name=./lama: nothing is there. Type a folder or URL of a model, "),
    ],
    ids=["package", "weights"],
)
def test_parts_that_are_not_here_are_refused_without_torch(
    words: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    code = "import sys\nfrom dtrain.__main__ import main\ncode = main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    (tmp_path / "llama").mkdir()
    command = [sys.executable, "-c", code, "plan", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and sentence in done.stderr
    assert ("Did you mean ./llama?" in done.stderr) == ("model=hf" in words)


def test_data_that_would_stop_the_run_is_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talks.write(tmp_path / "rows.jsonl", talks.talks())
    words = ["data=chat", f"data.path={tmp_path}/rows.jsonl", f"data.tokenizer={talks.tokenizer(tmp_path / 'tk')}"]
    small = ["data.sequence=8", "model.vocab=400", "model.width=32", "model.heads=2", f"data.cache={tmp_path}"]
    assert main(["plan", *words, *small]) == 0
    shown = capsys.readouterr().out
    assert "stops it    data.path" in shown, shown
    assert "data.sequence=" in shown.partition("stops it")[2]
    assert "PreflightError" not in shown
