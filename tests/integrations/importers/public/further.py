"""Forty more public configs and scripts, of the commits that they name: what each sets, what a person has to type, and what the tool trains, by hand
from its source.
"""

from typing import Any

from integrations.importers.public.forty import ADAMW, AXOLOTL, CHAT, COSINE, HF, LINE, OWN, PAIRS, SEVEN, adapter
from integrations.importers.public.row import Row
from integrations.importers.public.scripts import OURS

CLASSES = "jsonl data.path=rows.jsonl data.inputs=ids data.targets=label"
DOCS = "huggingface/transformers@{} docs/source/en/tasks/{}#train.py"
ONE = "from transformers import TrainingArguments\nargs = TrainingArguments({})\n"
SCRIPT = "from transformers import {1}, {0}Trainer, {0}TrainingArguments\nmodel = {1}.from_pretrained('{2}')\nargs = {0}TrainingArguments({3})\n{0}Trainer(model, args{4})\n"


def script(kind: str, model: str, name: str, arguments: str, trainer: str = "") -> str:
    return SCRIPT.format(kind, model, name, arguments, trainer)


TRANSFORMERS = [
    Row("JoyTzuWon/CommonSense-Recognition-and-Explanation@334d91acf48b188b4ee0f657e73d7fb154c1861f train_setting.py",
        ONE.format("num_train_epochs=7, learning_rate=1e-5, per_device_train_batch_size=16, gradient_accumulation_steps=4, warmup_steps=250, lr_scheduler_type='constant',"
                   " weight_decay=0.01, load_best_model_at_end=True, metric_for_best_model='accuracy', seed=2025, fp16=True"),
        {"data": CLASSES},
        {**HF, "optim.weight_decay": 0.01, "schedule": "constant", "schedule.warmup": 0, "precision": "fp16", "optim.lr": 1e-5, "batch.micro": 16, "batch.accumulate": 4,
         "epochs": 7, "seed": 2025}),
    Row("paulohl/hugging_face_diffusers_manuscript@9cc1ba1501952ec40748259a617a2275d0aa6253 HFDL_book_root/HFD_Chapter01_code_examples/Ch01-12_train_setup.py",
        ONE.format("num_train_epochs=3, per_device_train_batch_size=4, warmup_steps=500, weight_decay=0.01, evaluate_during_training=True"),
        {"evaluate.every": 50},
        {**HF, **LINE, "optim.weight_decay": 0.01, "schedule.warmup": 500, "precision": "fp32", "optim.lr": 5e-5, "batch.micro": 4, "batch.accumulate": 1, "epochs": 3},
        ["TrainingArguments.evaluate_during_training"]),
    Row("ava-orange-education/Ultimate-LLMOps-for-LLM-Engineering@b3873c88d45da7244ac905adc5244793d89f1e30 Chapter_09/code_block_007.py",
        ONE.format("num_train_epochs=3, per_device_train_batch_size=4, save_steps=500, save_total_limit=2, learning_rate=5e-5, report_to='none'"),
        {}, {**HF, **LINE, "precision": "fp32", "optim.lr": 5e-5, "batch.micro": 4, "batch.accumulate": 1, "epochs": 3, "seed": 42}),
    Row(DOCS.format("114943ca1cf313d83d0fa7b2d21bf482a7cfe78a", "summarization.md"),
        script("Seq2Seq", "AutoModelForSeq2SeqLM", "t5-small", "evaluation_strategy='epoch', learning_rate=2e-5, per_device_train_batch_size=16, weight_decay=0.01,"
               " save_total_limit=3, num_train_epochs=4, predict_with_generate=True, fp16=True", ", data_collator=DataCollatorForSeq2Seq(tokenizer)"),
        {"data": CLASSES},
        {**HF, **LINE, "optim.weight_decay": 0.01, "model": "t5-small", "task": "seq2seq", "precision": "fp16", "optim.lr": 2e-5, "batch.micro": 16, "batch.accumulate": 1,
         "epochs": 4}),
    Row(DOCS.format("15828dddf0b59446ef30a595549cd11acb6cb7e7", "asr.md"),
        script("", "AutoModelForCTC", "facebook/wav2vec2-base", "per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-5, warmup_steps=500,"
               " max_steps=2000, gradient_checkpointing=True, fp16=True, train_sampling_strategy='group_by_length', eval_strategy='steps', save_steps=1000, eval_steps=1000"),
        {"model": "hf", "model.name": "facebook/wav2vec2-base", "model.task": "classification", "data": CLASSES},
        {**HF, **LINE, "schedule.warmup": 500, "precision": "fp16", "remat": "full", "optim.lr": 1e-5, "batch.micro": 8, "batch.accumulate": 2, "steps": 2000,
         "evaluate.every": 1000}, ["model.class", "TrainingArguments.train_sampling_strategy"]),
    Row(DOCS.format("0bef719a6b53ad4880082ca14c178219eff1b292", "image_classification.md"),
        script("", "AutoModelForImageClassification", "google/vit-base-patch16-224-in21k", "evaluation_strategy='epoch', save_strategy='epoch', learning_rate=5e-5,"
               " per_device_train_batch_size=16, gradient_accumulation_steps=4, num_train_epochs=3, warmup_ratio=0.1, load_best_model_at_end=True,"
               " metric_for_best_model='accuracy'", ", compute_metrics=compute_metrics"),
        {"model.head": "new", "data": CLASSES},
        {**HF, **LINE, "schedule.warmup": 0.1, "precision": "fp32", "task": "image_classification", "optim.lr": 5e-5, "batch.micro": 16, "batch.accumulate": 4, "epochs": 3}),
    Row(DOCS.format("03cd27c6a6a989a2e49157d61834dbaa32bd9152", "language_modeling.md"),
        script("", "AutoModelForCausalLM", "distilgpt2", "evaluation_strategy='epoch', learning_rate=2e-5, weight_decay=0.01",
               ", data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)"),
        {},
        {**HF, **LINE, "optim.weight_decay": 0.01, "objective": "next_token", "task": "causal_lm", "precision": "fp32", "optim.lr": 2e-5, "batch.micro": 8,
         "batch.accumulate": 1, "epochs": 3}),
    Row("quangminhdinh/DiffLM-Control-Style-Transfering@8f80850d24dde776d0535f01404a2de1a9ec470f trainer.py",
        script("", "AutoModelForCausalLM", "gpt2", "num_train_epochs=20, per_device_train_batch_size=16, warmup_steps=500, weight_decay=0.01, evaluation_strategy='epoch',"
               " logging_steps=10, label_names=['labels']", ", compute_metrics=compute_metrics"),
        {"evaluate.metrics": "[accuracy]", "data": CHAT},
        {**HF, **LINE, "schedule.warmup": 500, "optim.weight_decay": 0.01, "precision": "fp32", "optim.lr": 5e-5, "batch.micro": 16, "batch.accumulate": 1, "epochs": 20}),
]  # fmt: skip

HANDBOOK = "huggingface/alignment-handbook@925acdfe4b2b4e38c3dabd1851bc418f0b656351 recipes/"
TRL = "huggingface/trl@f2cd57710ae345ea6428ae95363267fcf38a3dc8 "


def recipe(name: str, lr: float, micro: int, accumulate: int, **more: Any) -> dict[str, Any]:
    """Keys that the recipes of the alignment handbook share."""
    return {
        "model_name_or_path": name, "torch_dtype": "bfloat16", "bf16": True, "gradient_checkpointing": True, "learning_rate": lr, "lr_scheduler_type": "cosine",
        "num_train_epochs": 1, "per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulate, "warmup_ratio": 0.1, "seed": 42, **more,
    }  # fmt: skip


BRANCH = {
    "model_revision": "it-SFT",
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "max_grad_norm": 0.2,
}
DPO_SCRIPT = """
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
args = DPOConfig(output_dir="out", logging_steps=10)
trainer = DPOTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=rows)
"""
SET_SCRIPT = """
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
args = DPOConfig(output_dir=f"run{part}")
setattr(args, 'per_device_train_batch_size', 4)
setattr(args, 'max_prompt_length', 128)
setattr(args, 'max_length', 512)
setattr(args, 'num_train_epochs', 4)
trainer = DPOTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
"""
STACK_SCRIPT = """
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained(given.name, dtype=dtype, load_in_4bit=given.load_in_4bit)
args = DPOConfig(max_steps=given.max_steps, learning_rate=given.learning_rate, per_device_train_batch_size=given.size, gradient_accumulation_steps=given.parts,
                 lr_scheduler_type=given.schedule, warmup_steps=given.warmup, optim=given.optim, bf16=True, seed=given.seed)
config = LoraConfig(r=given.r, lora_alpha=given.alpha, lora_dropout=given.dropout, target_modules=["q_proj", "v_proj", "k_proj", "out_proj"], bias="none")
trainer = DPOTrainer(model, ref_model=None, args=args, beta=given.beta, peft_config=config, max_prompt_length=given.prompt, max_length=given.length)
"""
TOOLS_SCRIPT = """
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained("CohereLabs/tiny-aya-global", dtype=torch.float16, quantization_config=bits)
config = LoraConfig(r=32, lora_alpha=32, target_modules=["q_proj", "v_proj"])
args = SFTConfig(output_dir=out, per_device_train_batch_size=1, gradient_accumulation_steps=4, warmup_steps=5, learning_rate=2e-4, optim="paged_adamw_8bit", max_length=1024)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, peft_config=config)
"""
TRANSFORMERS += [
    Row(f"{HANDBOOK}smollm3/dpo/apo.yaml",
        recipe("HuggingFaceTB/SmolLM3-3B-checkpoints", 1e-6, 1, 2, **BRANCH, beta=0.05, loss_type="apo_zero", max_length=24576, save_strategy="steps", save_steps=0.5),
        {"objective": "dpo", "objective.beta": 0.05, "objective.loss": "sigmoid", "checkpoint.every": 50, "data": PAIRS},
        {**HF, **COSINE, "schedule.floor": 0.1, "clip": 0.2, "objective": "dpo", "objective.beta": 0.05, "model": "HuggingFaceTB/SmolLM3-3B-checkpoints@it-SFT",
         "precision": "bf16_true", "remat": "full", "optim.lr": 1e-6, "batch.micro": 1, "batch.accumulate": 2, "epochs": 1, "data.sequence": 24576}, ["beta", "loss_type"]),
    Row(f"{HANDBOOK}smollm3/sft/sft.yaml",
        recipe("HuggingFaceTB/SmolLM3-3B-checkpoints", 2e-5, 1, 2, **{**BRANCH, "model_revision": "it-mid-training"}, assistant_only_loss=True, packing=True, max_length=65536,
               max_steps=-1, num_train_epochs=5, warmup_ratio=0.03),
        {"data": CHAT},
        {**HF, **COSINE, "schedule.warmup": 0.03, "schedule.floor": 0.1, "clip": 0.2, "objective": "next_token", "precision": "bf16_true", "remat": "full", "optim.lr": 2e-5,
         "batch.micro": 1, "batch.accumulate": 2, "epochs": 5, "data.sequence": 65536, "data.packing": "pack", "data.train_on": "answers"}),
    Row(f"{HANDBOOK}constitutional-ai/dpo/config_anthropic.yaml",
        recipe("alignment-handbook/mistral-7b-sft-constitutional-ai", 5e-7, 2, 1, torch_dtype=None, beta=0.1, optim="rmsprop", lr_scheduler_type="linear", num_train_epochs=3,
               max_length=1024, max_prompt_length=512),
        {"objective": "dpo", "objective.beta": 0.1, "optim": "adamw", "optim.lr": 5e-7, "optim.weight_decay": 0.0, "data": PAIRS},
        {"clip": 1.0, "optim.lr": 5e-7, **LINE, "schedule.warmup": 0.1, "objective": "dpo", "objective.beta": 0.1, "precision": "bf16", "remat": "full", "batch.micro": 2,
         "batch.accumulate": 1, "epochs": 3, "data.sequence": 1024}, ["optim", "max_prompt_length"]),
    Row(f"{HANDBOOK}zephyr-7b-beta/sft/config_qlora.yaml",
        recipe("mistralai/Mistral-7B-v0.1", 2e-4, 4, 2, load_in_4bit=True, use_peft=True, lora_r=16, lora_alpha=16, lora_dropout=0.05, lora_target_modules=SEVEN,
               max_seq_length=2048, dataset_mixture={"seed": 0}),
        {"objective": "next_token", "data": CHAT},
        {**HF, **COSINE, **adapter("qlora", 16, 16, 0.05, SEVEN), "adapter.double": False, "precision": "bf16", "remat": "full", "optim.lr": 2e-4, "batch.micro": 4,
         "batch.accumulate": 2, "epochs": 1, "data.sequence": 2048}),
    Row("zenoy802/My-Open-LLM@2312bb0b70e24b675dcf0e0e1c8da0ddf1bfef82 DPO/train_dpo.py", DPO_SCRIPT,
        {"data": PAIRS},
        {**HF, **LINE, "objective": "dpo", "objective.beta": 0.1, "objective.loss": "sigmoid", "precision": "bf16", "remat": "full", "optim.lr": 1e-6, "batch.micro": 8,
         "batch.accumulate": 1, "epochs": 3, "data.sequence": 1024}),
    Row("biosharp18/CS245-project@0f82e78b8008f3b8a1b34e08a85645f770fbbede DPO_test.py", SET_SCRIPT,
        {"out": "run", "data": PAIRS},
        {**HF, **LINE, "objective": "dpo", "objective.beta": 0.1, "precision": "bf16", "optim.lr": 1e-6, "batch.micro": 4, "batch.accumulate": 1, "epochs": 4,
         "data.sequence": 512}, ["DPOConfig.max_prompt_length"]),
    Row("huggingface/trl@0567e7f45781db6ce294d5b7b2b6c735cd49073e examples/research_projects/stack_llama_2/scripts/dpo_llama2.py", STACK_SCRIPT,
        {"model.name": "my/sft", "steps": 1000, "microbatch": 4, "accumulate": 4, "seed": 0, "objective.beta": 0.1, "adapter": "lora", "adapter.rank": 8, "adapter.alpha": 16,
         "adapter.dropout": 0.05, "optim": "adamw", "optim.lr": 5e-4, "optim.betas": "[0.9,0.999]", "optim.weight_decay": 0.0, "schedule": "cosine schedule.floor=0", "schedule.warmup": 100,
         "data": PAIRS},
        {**HF, "optim.lr": 5e-4, "schedule": "cosine", "schedule.warmup": 100, "schedule.floor": 0.0, "objective": "dpo", "objective.beta": 0.1, "precision": "bf16", "adapter": "lora",
         "adapter.targets": ["q_proj", "v_proj", "k_proj", "out_proj"], "batch.micro": 4, "batch.accumulate": 4, "steps": 1000},
        ["Trainer.beta", "DPOConfig.learning_rate", "DPOConfig.optim"]),
    Row(f"{TRL}examples/scripts/sft_tiny_aya_tool_calling.py", TOOLS_SCRIPT,
        {**OWN, "optim.lr": 2e-4, "optim.weight_decay": 0.0, "adapter": "lora", "precision": "fp16", "data.train_on": "all", "out": "run", "data": CHAT},
        {**HF, **LINE, "schedule.warmup": 5, **adapter("lora", 32, 32, 0.0, ["q_proj", "v_proj"]), "objective": "next_token", "precision": "fp16", "remat": "full",
         "optim.lr": 2e-4, "batch.micro": 1, "batch.accumulate": 4, "epochs": 3, "data.sequence": 1024}, ["SFTConfig.optim", "model.dtype"]),
]  # fmt: skip

LOCAL = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "machine_rank": 0,
    "mixed_precision": "bf16",
    "rdzv_backend": "static",
    "same_network": True,
}
AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
CPU = {"device": "cpu", "pin_memory": True}
FILLED = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
GIVEN = {
    "batch": 32,
    "microbatch": 4,
    "clip": 1.0,
    "optim.lr": 1e-5,
    "optim.betas": "[0.9,0.999]",
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.0,
    "precision": "bf16",
}


def warm(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", **more},
    }


DEEPSPEED = [
    Row("databrickslabs/dolly@c89f48d2648f05c742770e9d856af3adc50ebd14 config/ds_z3_bf16_config.json",
        {**AUTO, "bf16": {"enabled": "auto"}, "optimizer": FILLED, "scheduler": warm("WarmupLR"), "zero_optimization": {"stage": 3, "overlap_comm": True},
         "steps_per_print": 2000},
        {**GIVEN, "schedule.warmup": 20},
        {**HF, "strategy": "zero3", "precision": "bf16", "schedule": "constant", "schedule.warmup": 20, "batch": 32, "batch.micro": 4, "optim.lr": 1e-5}),
    Row("tatsu-lab/stanford_alpaca@3783d185b542c9be78581c5ebc30f7e8688294b2 configs/default_offload_opt_param.json",
        {**AUTO, "bf16": {"enabled": "auto"}, "optimizer": FILLED, "scheduler": warm("WarmupDecayLR", total_num_steps="auto"),
         "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}},
        {**GIVEN, "schedule.warmup": 20, "steps": 900},
        {**HF, "strategy": "zero3", "offload": "cpu", "precision": "bf16", **LINE, "schedule.warmup": 20, "steps": 900, "batch": 32, "batch.micro": 4}),
    Row("haotian-liu/LLaVA@02585ac91de123763200a608b17ac5349eb7fd73 scripts/zero3_offload.json",
        {**AUTO, "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2}, "bf16": {"enabled": True}, "optimizer": FILLED, "scheduler": warm("WarmupLR"),
         "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "gather_16bit_weights_on_model_save": True}},
        {**{word: value for word, value in GIVEN.items() if word != "precision"}, "schedule.warmup": 20},
        {**HF, "strategy": "zero3", "offload": "cpu", "precision": "bf16", "schedule": "constant", "schedule.warmup": 20, "batch": 32}),
]  # fmt: skip
ACCELERATE = [
    Row(f"{TRL}examples/accelerate_configs/alst_ulysses_4gpu.yaml",
        {**LOCAL, "distributed_type": "DEEPSPEED", "num_processes": 4,
         "deepspeed_config": {"zero_stage": 3, "seq_parallel_communication_data_type": "bf16", "offload_optimizer_device": "none", "zero3_init_flag": True},
         "parallelism_config": {f"parallelism_config_{axis}_size": size for axis, size in (("dp_replicate", 1), ("dp_shard", 2), ("tp", 1), ("sp", 2))}},
        {"batch": 8}, {"strategy": "zero3", "mesh.dp_shard": 2, "mesh.cp": 2, "devices": 4, "precision": "bf16", "clip": 1.0, "batch": 8},
        ["deepspeed_config.seq_parallel_communication_data_type"]),
    Row(f"{TRL}examples/accelerate_configs/deepspeed_zero1.yaml",
        {**LOCAL, "distributed_type": "DEEPSPEED", "num_processes": 8,
         "deepspeed_config": {"zero_stage": 1, "gradient_accumulation_steps": 1, "deepspeed_multinode_launcher": "standard", "zero3_init_flag": False}},
        {"microbatch": 2}, {"strategy": "zero1", "devices": 8, "precision": "bf16", "clip": 1.0, "batch": 16, "batch.micro": 2, "batch.accumulate": 1}),
    Row(f"{TRL}trl/accelerate_configs/single_gpu.yaml", {**LOCAL, "distributed_type": "NO", "gpu_ids": "all", "num_processes": 8},
        {"strategy": "single", "devices": 1}, {"strategy": "single", "devices": 1, "precision": "bf16"}, ["distributed_type", "num_processes"]),
]  # fmt: skip

TUNE = "pytorch/torchtune@bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1 recipes/configs/"


def tune(builder: str, lr: float, micro: int, accumulate: int, folder: str, **more: Any) -> dict[str, Any]:
    """Keys that all of its files have."""
    return {
        "model": {"_component_": f"torchtune.models.{builder}"}, "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": False}, "seed": None,
        "shuffle": True, "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": folder, "output_dir": "${output_dir}"},
        "output_dir": "/tmp/out", "batch_size": micro, "epochs": 1, "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": lr},
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}, "max_steps_per_epoch": None, "gradient_accumulation_steps": accumulate,
        "clip_grad_norm": None, "device": "cuda", "dtype": "bf16", "enable_activation_checkpointing": True, **more,
    }  # fmt: skip


def lora_of(builder: str, rank: int, **more: Any) -> dict[str, Any]:
    return {
        "_component_": f"torchtune.models.{builder}", "lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True, "lora_rank": rank,
        "lora_alpha": 2 * rank, "lora_dropout": 0.0, **more,
    }  # fmt: skip


SIX = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARM = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 100}
TORCH = {
    "optim": "adamw",
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.01,
    "clip": None,
    "precision": "bf16_true",
}
TORCHTUNE = [
    Row(f"{TUNE}llama3_1/8B_lora_dpo.yaml",
        tune("", 5e-4, 4, 8, "/tmp/Meta-Llama-3.1-8B-Instruct/", model=lora_of("llama3_1.lora_llama3_1_8b", 8, apply_lora_to_output=False), lr_scheduler=WARM,
             loss={"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1, "label_smoothing": 0}, max_steps_per_epoch=1000,
             optimizer={"_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.05, "lr": 5e-4},
             dataset={"_component_": "torchtune.datasets.stack_exchange_paired_dataset"}),
        {"data": PAIRS},
        {**TORCH, "optim.weight_decay": 0.05, "objective": "dpo", "objective.beta": 0.1, **adapter("lora", 8, 16, 0.0, SIX), "schedule": "cosine", "schedule.warmup": 100,
         "schedule.floor": 0.0, "steps": 1000, "batch.micro": 4, "batch.accumulate": 8, "optim.lr": 5e-4}),
    Row(f"{TUNE}gemma/2B_lora.yaml",
        tune("", 2e-5, 4, 1, "/tmp/gemma-2b/", model=lora_of("gemma.lora_gemma_2b", 64), lr_scheduler=WARM), {"data": CHAT},
        {**TORCH, **adapter("lora", 64, 128, 0.0, SIX), "schedule": "cosine", "schedule.warmup": 100, "schedule.floor": 0.0, "remat": "full", "batch.micro": 4,
         "batch.accumulate": 1, "epochs": 1, "optim.lr": 2e-5}),
    Row(f"{TUNE}phi3/mini_lora.yaml",
        tune("", 3e-4, 2, 8, "/tmp/Phi-3-mini-4k-instruct", model=lora_of("phi3.lora_phi3_mini", 8, apply_lora_to_output=False), lr_scheduler=WARM,
             enable_activation_checkpointing=False, optimizer={"_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.01, "lr": 3e-4}),
        {"model": "hf model.name=/tmp/Phi-3-mini-4k-instruct", "adapter": "lora", "data": CHAT},
        {**TORCH, "adapter": "lora", "schedule": "cosine", "schedule.warmup": 100, "remat": "none", "batch.micro": 2, "batch.accumulate": 8, "epochs": 1, "optim.lr": 3e-4},
        ["model._component_", "model.lora_rank"]),
    Row(f"{TUNE}llama2/7B_qat_full.yaml",
        tune("llama2.llama2_7b", 2e-5, 2, 1, "/tmp/Llama-2-7b-hf", optimizer_in_bwd=False, compile=False,
             quantizer={"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer", "groupsize": 256}), {"data": CHAT},
        {**TORCH, "adapter": "none", "schedule": "constant", "schedule.warmup": 0, "remat": "full", "batch.micro": 2, "batch.accumulate": 1, "epochs": 1, "optim.lr": 2e-5},
        ["quantizer._component_"]),
]  # fmt: skip

TERRA = "IBM/terratorch@{} examples/confs/{}"


def terra(optimizer: str, lr: float, patience: int, **more: Any) -> dict[str, Any]:
    return {
        "seed_everything": 0,
        "trainer": {"accelerator": "auto", "strategy": "auto", "devices": "auto", "num_nodes": 1, "max_epochs": 200, "log_every_n_steps": 50,
                    "callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": patience}}], **more},
        "model": {"class_path": "terratorch.tasks.SemanticSegmentationTask"}, "data": {"class_path": "GenericDataModule", "init_args": {"batch_size": 4}},
        "optimizer": {"class_path": f"torch.optim.{optimizer}", "init_args": {"lr": lr, "weight_decay": 0.05}},
        "lr_scheduler": {"class_path": "ReduceLROnPlateau", "init_args": {"monitor": "val/loss"}},
    }  # fmt: skip


LIGHTNING = [
    Row("Alicegaz/MNIST_PL_DEMO@1386ba6899ba075711aa7fac26519823d824c69b run.py",
        "from pytorch_lightning import Trainer\ntrainer = Trainer(gpus=1, precision=16, progress_bar_refresh_rate=5, max_epochs=10)\ntrainer.fit(model)\n",
        OURS, {"devices": 1, "precision": "fp16", "clip": None, "epochs": 10}),
    Row("gptrapletti/clip-classifier@285337beaaa39bfc39e7f143b6a06e0da44c098e src/trainer.py",
        "from pytorch_lightning import Trainer\ndef get(n, logger, callbacks, device):\n    return Trainer(max_epochs=n, logger=logger, callbacks=callbacks,"
        " log_every_n_steps=5, gradient_clip_val=0.5, accelerator='gpu', devices=[device])\n",
        {**OURS, "epochs": 7, "devices": 1}, {"clip": 0.5, "precision": "fp32", "log.every": 5}, ["trainer.max_epochs"]),
    Row(TERRA.format("16f612b7aab5c409aa7a29a4c65692b349f7d416", "burn_scars.yaml"), terra("Adam", 1.5e-5, 40, precision="16-mixed"),
        {**OURS, "optim": "adamw", "optim.lr": 1.5e-5, "optim.betas": "[0.9,0.999]", "optim.weight_decay": 0.05, "schedule": "constant", "schedule.warmup": 0},
        {**OURS, "optim": "adamw", "optim.lr": 1.5e-5, "optim.weight_decay": 0.05, "schedule": "constant", "schedule.warmup": 0, "precision": "fp16", "clip": None, "seed": 0, "epochs": 200}, ["optimizer.class_path", "lr_scheduler.class_path"]),
    Row(TERRA.format("188f894ea810c865925355a6a7a9881e285557fb", "eurosat.yaml"), terra("AdamW", 1e-4, 20),
        {"objective": "next_token", "batch": 16, "schedule": "constant", "schedule.warmup": 0},
        {**ADAMW, "optim.lr": 1e-4, "optim.weight_decay": 0.05, "schedule": "constant", "schedule.warmup": 0, "precision": "fp32", "clip": None, "seed": 0, "epochs": 200}, ["lr_scheduler.class_path"]),
]  # fmt: skip
FURTHER = {
    "accelerate": ACCELERATE,
    "axolotl": AXOLOTL,
    "deepspeed": DEEPSPEED,
    "lightning": LIGHTNING,
    "torchtune": TORCHTUNE,
    "transformers": TRANSFORMERS,
}
