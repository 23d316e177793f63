"""Values of DeepSpeed's files, against what its documentation says they mean."""

import json
from pathlib import Path
from typing import Any

import pytest
from imported import Imported, example, imported


def config(folder: Path, **keys: Any) -> Imported:
    path = folder / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, **keys}))
    return imported(path)


def test_a_finetuning_file() -> None:
    read = example("ds_zero2_offload.json")
    assert read.words == {
        "batch": 256, "microbatch": 8, "strategy": "zero2", "strategy.offload": "cpu", "precision": "fp16", "precision.scale": 4096.0, "precision.growth": 500,
        "optim": "adamw", "optim.lr": 3e-5, "optim.betas": [0.9, 0.98], "optim.eps": 1e-6, "optim.weight_decay": 0.05,
        "schedule": "linear", "schedule.warmup": 1000, "schedule.floor": 0.0, "steps": 20000, "clip": 1.0, "log.every": 100,
    }  # fmt: skip
    assert "8 data-parallel rank(s)" in read.told("carried")["train_micro_batch_size_per_gpu"]
    assert not read.told("refused")
    assert "two steps behind, a decay one" in read.told("carried")["scheduler.params.warmup_num_steps"]


def test_numbers_that_stand_there_as_texts(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": "64", "gradient_clipping": "1.0", "zero_optimization": {"stage": "3", "offload_optimizer": {"device": "cpu"}}}'
    )
    read = imported(path)
    assert read.words == {
        "batch": 64,
        "accumulate": 1,
        "clip": 1.0,
        "strategy": "zero3",
        "strategy.offload": "cpu",
        "precision": "fp32",
    }
    assert read.told("refused") == {}


def test_what_the_huggingface_trainer_fills_in_is_asked_for() -> None:
    read = example("ds_zero3_auto.json")
    assert read.words == {"strategy": "zero3", "optim": "adamw", "schedule": "constant", "log.every": 2000}
    refused = read.told("refused")
    assert {"precision", "optim.lr", "schedule.warmup", "clip", "batch"} <= read.asked
    assert "Type optim.lr=<value>" in refused["scheduler.params.warmup_max_lr"]
    assert "Type batch=<value>" in refused["train_batch_size"]
    assert "Type clip=<value>" in refused["gradient_clipping"]
    assert "Type precision=<value>" in refused["bf16.enabled"]
    assert "zero_optimization.reduce_bucket_size" in read.told("unneeded")


def test_what_is_not_here_is_refused() -> None:
    read = example("ds_zero3_nvme.json")
    assert read.words == {"microbatch": 1, "accumulate": 16, "strategy": "zero3", "precision": "bf16", "clip": None}
    refused = read.told("refused")
    assert "no offload to disk" in refused["zero_optimization.offload_param.device"]
    assert "strategy=hsdp" in refused["zero_optimization.zero_hpz_partition_size"]
    assert "remat=full" in refused["activation_checkpointing.cpu_checkpointing"]
    assert "Did you mean zero_optimization.stage?" in refused["zero_optimisation.stage"]


def test_a_pipeline(tmp_path: Path) -> None:
    read = example("ds_pipeline.json")
    assert read.words == {
        "batch": 64, "microbatch": 2, "strategy": "zero1", "precision": "bf16", "optim": "adamw", "optim.lr": 6e-4, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8,
        "optim.weight_decay": 0.1, "schedule": "cosine", "schedule.warmup": 200, "schedule.floor": 0.1, "steps": 5000, "mesh.pp": 2, "pipeline.split": "blocks",
        "remat": "full", "logger": ["console", "tensorboard"], "clip": None, "devices": 2,
    }  # fmt: skip
    assert read.plan(tmp_path, "devices=8").batch.accumulate == 8  # 64 = 2 x 4 data-parallel x 8


def test_a_foreign_optimizer() -> None:
    read = example("ds_onebit.json")
    assert read.words == {
        "batch": 4096,
        "accumulate": 8,
        "strategy": "ddp",
        "schedule": "constant",
        "schedule.warmup": 0,
        "clip": None,
        "precision": "fp32",
        "logger": ["console", "comet"],
        "logger.comet.project": "bert",
    }
    assert "environment" in read.told("refused")["comet.api_key"]
    assert "unknown optimizer OneBitAdam" in read.told("refused")["optimizer.params.freeze_step"]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((32, 4, 8), {"batch": 32, "microbatch": 4}),
        ((32, 4, None), {"batch": 32, "microbatch": 4}),
        ((32, None, 8), {"batch": 32, "accumulate": 8}),
        ((None, 4, 8), {"microbatch": 4, "accumulate": 8}),
        ((32, None, None), {"batch": 32, "accumulate": 1}),
        ((None, 4, None), {"microbatch": 4, "accumulate": 1}),
        ((30, 4, 8), {}),
        ((None, 0, 8), {"accumulate": 8}),
        (("32", "4", "auto"), {"batch": 32, "microbatch": 4}),
    ],
)
def test_two_of_three_make_a_batch(sizes: tuple[int | None, ...], words: dict[str, int], tmp_path: Path) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {"steps_per_print": 1} | {key: value for key, value in zip(keys, sizes, strict=True) if value is not None}
        )
    )
    read = imported(path)
    assert {word: value for word, value in read.words.items() if word in ("batch", "microbatch", "accumulate")} == words
    assert ("train_batch_size" in read.told("refused")) == (sizes == (30, 4, 8))


@pytest.mark.parametrize(("stage", "word"), [(0, "ddp"), (1, "zero1"), ("2", "zero2"), (3, "zero3")])
def test_stages(stage: int | str, word: str, tmp_path: Path) -> None:
    assert config(tmp_path, zero_optimization={"stage": stage}).words["strategy"] == word


@pytest.mark.parametrize("stage", [4, "two", True, None])
def test_no_other_stages(stage: Any, tmp_path: Path) -> None:
    read = config(tmp_path, zero_optimization={"stage": stage})
    assert "strategy" not in read.words or read.words["strategy"] == "ddp"
    assert "zero_optimization.stage" in {**read.told("refused"), **read.told("unneeded")}


def test_nothing_rests_where_nothing_is_sharded(tmp_path: Path) -> None:
    read = config(tmp_path, zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu"}})
    assert "stage 0 shards nothing" in read.told("refused")["zero_optimization.offload_optimizer.device"]
    assert "strategy.offload" not in read.words


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        (
            "Adam",
            {"lr": 1e-3, "weight_decay": 0.1},
            {"optim": "adamw", "optim.weight_decay": 0.1},
        ),  # AdamW, unless told otherwise
        ("Adam", {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}, {}),
        ("Adam", {"lr": 1e-3, "adam_w_mode": False}, {"optim": "adamw", "optim.weight_decay": 0.0}),
        ("AdamW", {"lr": 1e-3}, {"optim": "adamw", "optim.weight_decay": 0.0}),  # of its own kernel
        ("AdamW", {"lr": 1e-3, "torch_adam": True}, {"optim": "adamw", "optim.weight_decay": 0.01}),  # of torch
        ("SGD", {"lr": 0.1, "momentum": 0.9}, {"optim": "sgd", "optim.weight_decay": 0.0}),
        ("Lamb", {"lr": 1e-3}, {}),
    ],
)
def test_optimizers(kind: str, params: dict[str, Any], words: dict[str, Any], tmp_path: Path) -> None:
    read = config(tmp_path, optimizer={"type": kind, "params": params})
    assert {word: value for word, value in read.words.items() if word in ("optim", "optim.weight_decay")} == words
    assert bool(words) != ("optimizer.type" in read.told("refused"))


def test_a_logarithmic_warmup_is_not_taken_for_a_line(tmp_path: Path) -> None:
    read = config(tmp_path, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 300, "warmup_max_lr": 1e-3}})
    assert read.words["schedule"] == "constant"
    assert "schedule.warmup" not in read.words and read.asked == {"schedule.warmup"}, (
        "without a warm-up it is another training"
    )
    assert "schedule.warmup=300" in read.told("refused")["scheduler.params.warmup_num_steps"]


def test_the_scheduler_sets_the_learning_rate_whatever_the_optimizer_says(tmp_path: Path) -> None:
    read = config(
        tmp_path,
        optimizer={"type": "AdamW", "params": {"lr": 1.0}},
        scheduler={
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_max_lr": 2e-4, "warmup_type": "linear"},
        },
    )
    assert read.words["optim.lr"] == 2e-4
    assert "optimizer.params.lr" in read.told("unneeded")


def test_a_scale_without_fp16_is_not_carried(tmp_path: Path) -> None:
    read = config(
        tmp_path,
        fp16={"enabled": "auto", "loss_scale_window": 500, "initial_scale_power": 16},
        bf16={"enabled": "auto"},
    )
    assert not any(word.startswith("precision.") for word in read.words) and "precision" in read.asked
    assert read.plan(tmp_path, "precision=bf16").precision["_target_"] == "dtrain.precision.bf16.build"


@pytest.mark.parametrize(
    ("dtype", "kind"), [("fp32", "unneeded"), ("fp16", "refused"), ("bf16", "refused"), (None, "unneeded")]
)
def test_the_type_that_gradients_travel_in(dtype: str | None, kind: str, tmp_path: Path) -> None:
    assert "communication_data_type" in config(tmp_path, communication_data_type=dtype).told(kind)


def test_what_is_to_be_typed_is_quoted_for_a_shell(tmp_path: Path) -> None:
    read = config(tmp_path, optimizer={"type": "Lamb", "params": {"lr": 1e-3}}, gradient_clipping="auto")
    last = read.recipe.splitlines()[3].partition("recipe=mine.yaml ")[2]
    assert last.startswith(
        "'optim=<adamw, sgd, muon or adafactor>' 'optim.lr=<0.001 with Lamb>' 'optim.weight_decay=<value>' 'clip=<value or null>'"
    )


def test_a_static_loss_scale_is_refused(tmp_path: Path) -> None:
    read = config(tmp_path, fp16={"enabled": True, "loss_scale": 128})
    assert "dynamic" in read.told("refused")["fp16.loss_scale"]
    assert read.words["precision.growth"] == 1000


def test_weights_in_bf16(tmp_path: Path) -> None:
    assert (
        config(tmp_path, bf16={"enabled": True, "bf16_master_weights_and_grads": True}).words["precision"]
        == "bf16_true"
    )


def test_numbers_that_are_texts_are_the_numbers(tmp_path: Path) -> None:
    params = {"lr": "3e-4", "betas": ["0.9", ".95"], "eps": "1e-8"}
    read = config(
        tmp_path, train_batch_size="32", gradient_clipping="1.0", optimizer={"type": "AdamW", "params": params}
    )
    assert (read.words["batch"], read.words["clip"], read.words["optim.lr"], read.words["optim.betas"]) == (
        32,
        1.0,
        3e-4,
        [0.9, 0.95],
    )
    assert not read.told("refused")


@pytest.mark.parametrize("odd", ["32 samples", "012", "３２", "1e999", "", [32]])
def test_what_is_no_number_is_asked_for(odd: object, tmp_path: Path) -> None:
    assert "batch" in config(tmp_path, train_batch_size=odd).asked
