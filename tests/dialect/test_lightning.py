"""Arguments of Lightning's Trainer, in Python and YAML, against its documentation."""

from pathlib import Path

import pytest
from imported import Imported, example, imported


def script(folder: Path, arguments: str) -> Imported:
    path = folder / "train.py"
    path.write_text(f"from lightning import Trainer\nraise SystemExit('this file is read, not run')\ntrainer = Trainer({arguments})\n")
    return imported(path)


def test_a_script() -> None:
    read = example("lightning_script.py")
    assert read.words == {
        "devices": 4, "nodes": 2, "strategy": "ddp", "precision": "bf16", "steps": 10_000, "accumulate": 2, "microbatch": 1,
        "clip": 0.5, "evaluate.every": 500, "log.every": 50, "time_limit": "0-12:30:00", "checkpoint.best": "eval_loss", "checkpoint.every": 500,
        "logger": ["console", "tensorboard"],
    }  # fmt: skip
    refused = read.told("refused")
    assert refused["trainer.default_root_dir"] == "computed in Python, which is not run. Type out=<value>."
    assert "GroupNorm" in refused["trainer.sync_batchnorm"]
    assert "EarlyStopping" in read.recipe


def test_the_time_limit_is_what_was_meant(tmp_path: Path) -> None:
    assert example("lightning_script.py").plan(tmp_path).time_limit == 12.5 * 3600


def test_an_object_of_a_strategy() -> None:
    read = example("lightning_fsdp.py")
    words = {
        "strategy": "fsdp",
        "strategy.reshard": "never",
        "strategy.rests": "cpu",
        "remat": "full",
        "precision": "fp16",
        "time_limit": 12600,
        "clip": None,
        "steps": "???",
    }
    assert read.words == words
    assert read.command["steps"] == "<3 x samples / batch>"
    assert "Did you mean trainer.accelerator?" in read.told("refused")["trainer.acelerator"]


def test_the_yaml_of_the_cli() -> None:
    read = example("lightning_cli.yaml")
    assert read.words == {
        "seed": 42, "devices": 2, "nodes": 1, "strategy": "zero2", "strategy.rests": "cpu", "precision": "bf16_true", "steps": 2000, "accumulate": 1, "microbatch": 1,
        "checkpoint.keep": None, "checkpoint.every": 200, "logger": ["console"], "optim": "adamw", "optim.lr": 1e-3, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8,
        "optim.weight_decay": 0.0, "schedule": "cosine", "schedule.warmup": 0, "schedule.floor": 0.0, "clip": None,
    }  # fmt: skip
    assert "torch.nn.Module" in read.told("refused")["model.init_args.width"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("strategy='deepspeed_stage_3_offload'", {"strategy": "zero3", "strategy.rests": "cpu"}),
        ("strategy='fsdp'", {"strategy": "fsdp", "strategy.reshard": "forward"}),
        ("strategy='auto', devices='auto'", {}),
        ("precision='16-mixed'", {"precision": "fp16"}),
        ("precision='32-true'", {"precision": "fp32"}),
        ("accelerator='cpu', devices='3'", {"backend": "gloo", "devices": 3, "batch": 3}),
        ("gradient_clip_val=0", {"clip": None}),
    ],
)
def test_arguments(argument: str, words: dict[str, object], tmp_path: Path) -> None:
    assert script(tmp_path, f"max_steps=-1, {argument}").words == {"clip": None} | words


@pytest.mark.parametrize(
    "argument", ["precision='64-true'", "strategy='dp'", "accelerator='tpu'", "overfit_batches=10", "gradient_clip_algorithm='value'"]
)
def test_what_is_not_here(argument: str, tmp_path: Path) -> None:
    read = script(tmp_path, f"max_steps=5, {argument}")
    assert list(read.told("refused")) == [f"trainer.{argument.split('=')[0]}"]
    assert read.words == {"steps": 5, "clip": None}


def test_batches_that_are_no_whole_steps(tmp_path: Path) -> None:
    read = script(tmp_path, "accumulate_grad_batches=4, val_check_interval=1001")
    assert "no whole number of steps" in read.told("refused")["trainer.val_check_interval"]


def test_epochs_beside_steps_are_not_forgotten(tmp_path: Path) -> None:
    assert "whichever comes first" in script(tmp_path, "max_steps=100, max_epochs=3").told("refused")["trainer.max_epochs"]
