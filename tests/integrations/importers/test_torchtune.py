"""Values of torchtune's files, against what its recipes do with them."""

from pathlib import Path

from imported import example, imported


def test_full_finetuning() -> None:
    read = example("torchtune_full.yaml")
    assert read.words == {
        "model": "hf", "model.name": "/data/Llama-3.1-8B", "objective": "next_token", "steps": 1500, "microbatch": 2, "accumulate": 8, "seed": 7,
        "optim": "adamw", "optim.lr": 2e-5, "optim.weight_decay": 0.1, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8,
        "schedule": "cosine", "schedule.warmup": 100, "schedule.floor": 0.0, "clip": 1.0, "compile": "blocks", "precision": "bf16_true", "remat": "full",
        "strategy": "fsdp", "strategy.offload": "cpu", "log.every": 5,
    }  # fmt: skip
    assert read.command["out"] == "/data/runs/llama3_1_8B" and read.open == {"data", "data.holdout"}
    assert read.ledger.leaves["metric_logger.log_dir"] == "/data/runs/llama3_1_8B/logs", (
        "a key that stands for another one"
    )


def test_texts_of_torchtune_are_refused() -> None:
    refused = example("torchtune_full.yaml").told("refused")
    assert "data.kind=instruction" in refused["dataset.packed"]


def test_an_adapter_without_a_folder_is_asked_for() -> None:
    read = example("torchtune_lora.yaml")
    assert "model._target_" not in read.words
    assert "optim" not in read.words
    assert {"model", "adapter"} <= read.open
    refused = read.told("refused")
    assert "adapter=lora" in refused["model.lora_rank"]
    assert "optim.lr=0.002" in refused["optimizer.lr"]
    assert read.words["epochs"] == 1 and "steps" not in read.command


def test_axes_and_another_optimizer(tmp_path: Path) -> None:
    read = example("torchtune_70b_tp.yaml")
    assert read.words == {
        "model._target_": "torchtune.models.llama3.llama3_70b", "objective": "next_token", "optim": "sgd", "optim.lr": 0.01, "optim.momentum": 0.9,
        "optim.nesterov": False, "optim.weight_decay": 0.0, "schedule": "constant", "schedule.warmup": 0, "strategy": "fsdp", "mesh.tp": 4, "mesh.dp_shard": 2,
        "microbatch": 1, "accumulate": 4, "precision": "bf16_true", "compile": "none", "remat": "full", "evaluate.every": 100, "checkpoint.every": 200,
        "checkpoint.keep": 3, "clip": None, "devices": 8, "epochs": 1,
    }  # fmt: skip
    assert read.plan(tmp_path).mesh.tp == 4


def test_the_environment_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tune.yaml"
    path.write_text("output_dir: ${oc.env:HOME}/runs\nmodel:\n  _component_: torchtune.models.llama3.llama3_8b\n")
    assert imported(path).command["out"] == "${oc.env:HOME}/runs"
