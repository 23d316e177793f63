"""What a file says of the method and dtrain does not take over is ??? in the recipe, so that nothing else is trained in its place."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from imported import Imported, imported

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.config.answers import SAID
from dtrain.config.elsewhere import OURS
from dtrain.config.meaning import meant
from dtrain.errors import WordsError
from dtrain.integrations.importers import accelerate, axolotl, deepspeed, lightning, torchtune, transformers, translate
from dtrain.resolve import resolve

AXOLOTL = {
    "base_model": "me/small",
    "sequence_len": 128,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_steps": 10,
    "learning_rate": 1e-4,
}
TRL = {"model_name_or_path": "me/small", "dataset_name": "me/chats", "max_steps": 10}
TUNE = {
    "batch_size": 1,
    "epochs": 1,
    "max_steps_per_epoch": 9,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
}
SFT = {**TRL, "assistant_only_loss": True, "packing": True, "learning_rate": 1e-4}


CLI = {
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
    "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 9}},
}
"""Of LightningCLI, which steps a schedule once an epoch."""


def read(folder: Path, written: dict[str, Any] | str) -> Imported:
    path = folder / ("train.py" if isinstance(written, str) else "theirs.yaml")
    path.write_text(written if isinstance(written, str) else yaml.safe_dump(written))
    return imported(path)


def trainer(arguments: str, of_args: str = "max_steps=9", name: str = "TrainingArguments") -> str:
    return f"from trl import *\nargs = {name}('out', {of_args})\ntrainer = Trainer({arguments}, args=args)\n"


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ({**AXOLOTL, "optimizer": "adamw_bnb_8bit", "weight_decay": 0.0}, "optim optim.lr optim.weight_decay optim.betas"),
        ({**AXOLOTL, "optimizer": "paged_adamw_8bit"}, "optim optim.weight_decay optim.betas"),
        ({**AXOLOTL, "optimizer": "lion"}, "optim optim.lr optim.weight_decay"),
        ({**AXOLOTL, "deepspeed": "not/there.json"}, "strategy clip"),
        ({**AXOLOTL, "rl": "grpo"}, "objective"),
        ({**AXOLOTL, "load_in_4bit": True, "adapter": "qlora", "lora_r": 8, "lora_alpha": 16, "fsdp_config": {"offload_params": True}}, "adapter"),
        ({**TRL, "learning_rate": 1e-5, "beta": 0.01, "load_in_4bit": True, "use_peft": True, "lora_r": 8}, "objective adapter.targets"),
        ({**TRL, "beta": 0.01}, "objective optim.lr"),
        ({**SFT, "load_in_8bit": True, "use_peft": True}, "adapter"),
        ({**SFT, "optim": "adamw_bnb_8bit"}, "optim optim.lr optim.weight_decay optim.betas"),
        ({**TRL, "num_generations": 8, "reward_funcs": "accuracy_reward"}, "objective"),
        ({"model_name_or_path": "me/small", "per_device_train_batch_size": 2, "max_steps": 9}, "optim.lr precision"),
        ({"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"deepspeed_config_file": "not/there.json"}}, "strategy clip precision batch"),
        ({**TUNE, "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLLoss"}, "loss": {"_component_": "torch.nn.CrossEntropyLoss"}}, "objective"),
        ({**TUNE, "loss": {"_component_": "torchtune.dev.grpo.loss.GRPOSimpleLoss"}}, "objective"),
        ({**TUNE, "optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": 1e-4}}, "optim optim.lr optim.weight_decay optim.betas"),
        ({"trainer": {"max_steps": 9, "devices": 2, "accumulate_grad_batches": 2}}, "microbatch"),
        ({"trainer": {"max_steps": 9, "devices": 2}}, "batch"),
        (trainer("compute_loss_func=mine"), "objective"),
        (trainer("model=made()"), "model"),
        (trainer("train_dataset=rows", "max_steps=9, label_smoothing_factor=0.1"), "objective"),
        (trainer("train_dataset=rows", "max_steps=9, neftune_noise_alpha=5"), "objective"),
        (trainer("train_dataset=rows", "max_steps=9, lr_scheduler_type='linear', lr_scheduler_kwargs={'power': 2}"), "schedule"),
        (trainer("train_dataset=rows", "max_steps=9, rpo_alpha=1.0, beta=0.3", "DPOConfig"), "objective objective.beta"),
        ({**AXOLOTL, "rl": "dpo", "rl_beta": 0.3, "rpo_alpha": 1.0}, "objective objective.beta"),
        ({**AXOLOTL, "noisy_embedding_alpha": 5}, "objective"),
        *(({**AXOLOTL, "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, **more}, "adapter")
          for more in ({"lora_modules_to_save": ["lm_head"]}, {"lora_rank_pattern": {"q_proj": 4}}, {"peft_init_lora_weights": "pissa"})),
        *((f"from peft import *\n{trainer('train_dataset=rows')}LoraConfig(r=8, target_modules='all-linear', {more})\n", "adapter")
          for more in ("bias='all'", "modules_to_save=['lm_head']", "init_lora_weights='pissa'", "init_lora_weights=False", "rank_pattern={'q_proj': 4}")),
        ({**SFT, "use_peft": True, "lora_target_modules": "all-linear", "lora_modules_to_save": ["lm_head"]}, "adapter"),
        ({"train_batch_size": 8, "scheduler": {"type": "OneCycle", "params": {"warmup_num_steps": 9}}}, "schedule schedule.warmup"),
        (f"from peft import *\n{trainer('train_dataset=rows')}PromptTuningConfig(num_virtual_tokens=8)\n", "adapter"),
        ({**TRL, "beta": 0.05, "loss_type": "apo_zero"}, "objective objective.beta objective.loss"),
        ({**SFT, "chat_template": "{{ messages }}"}, "data data.template"),
        ({"training": {"batch_size": 2, "warmup_steps": 9, "steps": 90}}, "schedule.warmup"),
        *((trainer("train_dataset=rows").replace("Trainer(", f"{name}("), "objective") for name in ("RewardTrainer", "ORPOTrainer", "their.FocalTrainer")),
        (trainer("train_dataset=rows", "max_steps=9, adafactor=True"), "optim optim.lr optim.weight_decay"),
        (trainer("train_dataset=rows", "max_steps=9, optim=given.optim"), "optim optim.lr optim.betas"),
        (trainer("train_dataset=rows") + "if fast:\n    args.learning_rate = 1e-3\n", "optim.lr"),
        (trainer("train_dataset=rows", "max_steps=9, loss_type='dft'", "SFTConfig"), "objective"),
        (trainer("train_dataset=rows", "max_steps=9, label_smoothing_factor=0.1", "Seq2SeqTrainingArguments"), "objective"),
        ({**AXOLOTL, "bf16": False, "float16": True}, "precision"),
        ({**AXOLOTL, "cosine_min_lr_ratio": 0.1, "cosine_constant_lr_ratio": 0.8}, "schedule"),
        ({**AXOLOTL, "lr_quadratic_warmup": True}, "schedule"),
        ({**AXOLOTL, "lr_scheduler_kwargs": {"num_cycles": 2}}, "schedule"),
        ({**AXOLOTL, "rl": "dpo", "dpo_loss_type": ["apo_zero"]}, "objective.loss"),
        ({**AXOLOTL, "rl": "dpo", "dpo_loss_weights": [0.8, 1.0]}, "objective"),
        ({**CLI, "trainer": {"max_steps": 9, "max_epochs": -1}}, "schedule schedule.warmup"),
        ({"distributed_type": "NO", "num_processes": 8, "mixed_precision": "bf16"}, "strategy devices"),
    ],
)  # fmt: skip
def test_what_decides_the_method_is_left_open(written: dict[str, Any] | str, asked: str, tmp_path: Path) -> None:
    found = read(tmp_path, written)
    missing = {word for word in asked.split() if found.ledger.words.get(word) != "???" or word not in found.command}
    assert not missing, (found.ledger.words, found.command)
    place = tmp_path / "recipe.yaml"
    place.write_text(found.recipe)
    with pytest.raises(WordsError) as raised:
        resolve(compose([f"recipe={place}"]), Cluster(gpus=2, cpus=2))
    for word in asked.split():
        assert f"leaves {word} to you" in str(raised.value) or word.split(".")[0] in asked.split(), word


def test_what_another_choice_does_not_take_is_no_longer_asked_for(tmp_path: Path) -> None:
    place = tmp_path / "recipe.yaml"
    place.write_text(read(tmp_path, {**AXOLOTL, "optimizer": "adamw_bnb_8bit"}).recipe)
    words = [
        "model=gpt",
        "data=text",
        "data.holdout=0",
        "optim=sgd",
        "optim.lr=0.1",
        "optim.weight_decay=0",
        "schedule=constant",
        "strategy=ddp",
    ]
    said = ""
    try:
        plan = resolve(compose([f"recipe={place}", *words]), Cluster(gpus=2, cpus=2))
    except WordsError as error:
        said = str(error)
    assert "betas" not in said, said
    assert said or plan.optim["lr"] == 0.1


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "num_processes": 2}, {"clip": 1.0, "strategy": "zero3"}),
        (SFT, {"precision": "bf16", "remat": "full", "optim.lr": 1e-4, "clip": 1.0, "model.name": "me/small", "optim.weight_decay": 0.0}),
        ({**TRL, "packing": False}, {"optim.lr": 2e-5, "precision": "bf16", "remat": "full", "microbatch": 8}),
        ({**TRL, "f_divergence_type": "reverse_kl"}, {"optim.lr": 1e-6, "objective": "dpo", "objective.beta": 0.1}),
        ({**SFT, "dtype": "bfloat16", "bf16": True}, {"precision": "bf16_true"}),
        ({**SFT, "use_peft": True, "load_in_4bit": True, "lora_target_modules": "all-linear"},
         {"adapter": "qlora", "adapter.double": False, "adapter.rank": 16, "adapter.alpha": 32, "adapter.dropout": 0.05, "adapter.targets": None, "precision": "bf16"}),
        ({**SFT, "use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj"], "dtype": "bfloat16"}, {"adapter": "lora", "adapter.rank": 4, "adapter.targets": ["q_proj"], "precision": "bf16"}),
        ({**SFT, "lora_r": 4, "use_peft": False}, {"adapter": None}),
        ({**SFT, "lr_scheduler_type": "cosine_with_restarts", "warmup_steps": 500}, {"schedule.warmup": 500, "schedule": None}),
        ({**AXOLOTL, "lr_scheduler": "one_cycle", "warmup_steps": 5}, {"schedule.warmup": 5, "schedule": None}),
        ({**TUNE, "lr_scheduler": {"_component_": "my.schedule", "num_warmup_steps": 5}}, {"schedule.warmup": 5, "schedule": None}),
        ({**AXOLOTL, "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "loraplus_lr_ratio": 16},
         {"adapter": "lora", "optim.lr_of": {"lora_B": 0.0016}}),
        (AXOLOTL, {"precision": "bf16_true"}),
        ({**AXOLOTL, "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}, {"precision": "bf16"}),
        ({**AXOLOTL, "bf16": "auto", "fp16": True}, {"precision": "fp16"}),
        ({**AXOLOTL, "bf16": True, "fp16": True}, {"precision": "bf16_true"}),
        ({**AXOLOTL, "rl": "dpo", "dpo_loss_type": ["hinge"], "rl_beta": 0.1, "trl": {"beta": 0.3}}, {"objective.loss": "hinge", "objective.beta": 0.3}),
        (trainer("model, None", "max_steps=9").replace("Trainer(model, None", "DPOTrainer(model, None, beta=0.2, loss_type='ipo'"),
         {"objective": "dpo", "objective.beta": 0.2, "objective.loss": "ipo"}),
        (trainer("train_dataset=rows", "per_gpu_train_batch_size=4, max_steps=0"), {"microbatch": 4, "epochs": 3, "steps": None}),
        (trainer("train_dataset=rows", "learning_rate=1e-3") + "args.learning_rate = 1e-4\nsetattr(args, 'max_steps', 7)\n", {"optim.lr": 1e-4, "steps": 7}),
        ({**CLI, "trainer": {"max_epochs": 9}}, {"schedule": "cosine", "schedule.warmup": 0, "schedule.floor": 0.0}),
    ],
)  # fmt: skip
def test_what_a_tool_fills_in_is_in_the_recipe(written: dict[str, Any], words: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, written).words
    assert {word: found.get(word) for word in words} == words


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_warm_up_that_another_program_fills_in_is_told_to_be_logarithmic(kind: str, tmp_path: Path) -> None:
    params = dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    tree = {"train_micro_batch_size_per_gpu": 1, "scheduler": {"type": kind, "params": params}}
    assert "its warm-up is logarithmic, here linear" in read(tmp_path, tree).told("carried")["scheduler.type"]
    params["warmup_type"] = "linear"
    assert "logarithmic" not in read(tmp_path, tree).told("carried")["scheduler.type"]


@pytest.mark.parametrize(
    ("metric", "higher", "words"),
    [
        (None, None, {"checkpoint.best": "eval_loss"}),
        ("eval_loss", False, {"checkpoint.best": "eval_loss", "checkpoint.best_is": "lowest"}),
        ("f1", True, {"evaluate.metrics": ["f1"], "checkpoint.best": "eval_f1", "checkpoint.best_is": "highest"}),
        ("eval_accuracy", None, {"evaluate.metrics": ["accuracy"], "checkpoint.best": "eval_accuracy"}),
        ("rouge", None, {}),
    ],
)
def test_the_best_checkpoint_is_that_of_the_metric(
    metric: str | None, higher: bool | None, words: dict[str, Any], tmp_path: Path
) -> None:
    given = f"max_steps=9, load_best_model_at_end=True, metric_for_best_model={metric!r}, greater_is_better={higher}"
    args = {"load_best_model_at_end": True, "metric_for_best_model": metric, "greater_is_better": higher}
    for found in (read(tmp_path, trainer("train_dataset=rows", given)), read(tmp_path, {**AXOLOTL, **args})):
        best = {word: each for word, each in found.words.items() if word.startswith(("evaluate.m", "checkpoint.b"))}
        assert best == words
        if not words:
            typed = "checkpoint.best=eval_rouge checkpoint.best_is=highest"
            assert any(typed in why for why in found.told("refused").values()) and "checkpoint.best" in found.asked


TABLES = {
    "accelerate": accelerate.RULES, "axolotl": axolotl.RULES, "deepspeed": deepspeed.RULES, "lightning": lightning.TRAINER, "torchtune": torchtune.RULES,
    "transformers": transformers.RULES,
}  # fmt: skip


@pytest.mark.parametrize("tool", TABLES)
def test_a_name_means_the_same_in_a_file_and_on_the_command_line(tool: str) -> None:
    wrong, compared = [], 0
    for name in sorted({*SAID, *OURS} & {*TABLES[tool]} - {"resume_from_checkpoint"}):
        for value in (4, True, "none", "cosine"):
            (entry, *_) = translate(
                {"trainer": {name: value}} if tool == "lightning" else {name: value}, tool, "file"
            ).entries
            if entry.kind == "carried":
                told = meant(name, str(value).lower())
                wrong += [(entry, told)] * (not any(f"{word}=" in told for word in entry.words))
                compared += 1
    assert wrong == [] and compared > 1


FAKE = {
    "qat.yaml": "base_model: a/b\nmicro_batch_size: 2\nsequence_len: 64\nqat:\n  weight_dtype: int4\n",
    "tune.yaml": "model:\n  _component_: torchtune.models.llama3.llama3_8b\nfake_quant_after_n_steps: 9\nquantizer:\n"
    "  _component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer\n  groupsize: 256\n",
    "titan.toml": "[model]\nname = 'llama3'\nconverters = ['quantize.linear.qat']\n[training]\nlocal_batch_size = 1\n",
}


@pytest.mark.parametrize("name", FAKE)
def test_fake_quantization_is_refused_with_what_to_do_in_its_place(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FAKE[name])
    lines = {key: why for key, why in imported(path).told("refused").items() if "q" in key or "converters" in key}
    of_it = {key: why for key, why in lines.items() if "sequence" not in key}
    assert of_it and all("checkpoint export" in why and "torchao" in why for why in of_it.values()), of_it


def test_a_file_without_a_seed_has_the_seed_of_the_tool(tmp_path: Path) -> None:
    file = {"base_model": "a/b", "micro_batch_size": 2, "sequence_len": 64}
    assert read(tmp_path, file).words["seed"] == 42
    assert read(tmp_path, {**file, "seed": None}).words["seed"] == 42
    assert read(tmp_path, {**file, "seed": 3}).words["seed"] == 3
