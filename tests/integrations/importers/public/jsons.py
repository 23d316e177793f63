"""Public configs of DeepSpeed and Accelerate: the values they set, what a person has to type, and what the training is, by hand.

Facts alone, of the file at `source`; what it says beside them changes no training.
"""

from typing import Any

from integrations.importers.public.row import Row

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
SCALE = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
AXOLOTL = {**SCALE, "auto_cast": False, "initial_scale_power": 32}
SIZES = {"batch": 32, "microbatch": 4, "clip": 1.0}
BATCH = {"batch": 32, "batch.micro": 4, "clip": 1.0}
CPU = {"device": "cpu", "pin_memory": True}
EXAMPLES = "microsoft/DeepSpeedExamples"


def adam(lr: float, **more: Any) -> dict[str, Any]:
    return {"type": "Adam", "params": {"lr": lr, **more}}


CIFAR = {"betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
ADAMW = {
    "optim": "adamw",
    "optim.betas": [0.8, 0.999],
    "optim.eps": 1e-8,
    "optim.weight_decay": 3e-7,
    "schedule": "constant",
    "schedule.warmup": 0,
}

DEEPSPEED = [
    Row(
        "huggingface/transformers tests/deepspeed/ds_config_zero2.json",
        {
            **AUTO, "fp16": {"enabled": "auto", **SCALE}, "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
            "zero_optimization": {"stage": 2, "offload_optimizer": CPU},
        },
        {**SIZES, "precision": "fp16", "optim.lr": 3e-5, "optim.betas": "[0.9,0.98]", "optim.eps": 1e-6, "optim.weight_decay": 0.1, "schedule.warmup": 7},
        {**BATCH, "strategy": "zero2", "offload": "cpu", "precision": "fp16", "optim": "adamw", "optim.lr": 3e-5, "optim.betas": [0.9, 0.98], "optim.eps": 1e-6,
         "optim.weight_decay": 0.1, "schedule": "constant", "schedule.warmup": 7},
    ),
    Row(
        "huggingface/transformers tests/deepspeed/ds_config_zero3.json",
        {
            "fp16": {"enabled": True, **SCALE}, "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, "steps_per_print": 2000,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, **CIFAR}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
        },
        {"schedule.warmup": 500},
        {**ADAMW, "schedule.warmup": 500, "strategy": "zero3", "offload": "cpu", "precision": "fp16", "scale": [65536, 1000], "clip": None, "optim.lr": 3e-5},
    ),
    Row(f"{EXAMPLES} compression/bert/config/ds_config.json",
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": 0}, "fp16": {"enabled": True}, "gradient_clipping": 1.0,
         "prescale_gradients": True},
        {}, {"strategy": "ddp", "batch": 32, "batch.micro": 32, "precision": "fp16", "scale": [65536, 1000], "clip": 1.0}),
    Row(f"{EXAMPLES} compression/gpt2/config/ds_config.json",
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "optimizer": adam(1e-3, **CIFAR), "zero_optimization": {"stage": 0}, "fp16": {"enabled": True},
         "gradient_clipping": 1.0},
        {}, {**ADAMW, "strategy": "ddp", "batch": 8, "batch.micro": 4, "precision": "fp16", "clip": 1.0, "optim.lr": 1e-3}),
    Row(f"{EXAMPLES} training/BingBertSquad/deepspeed_bsz24_config.json",
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "optimizer": adam(3e-5, weight_decay=0.0, bias_correction=False), "gradient_clipping": 1.0,
         "fp16": {"enabled": True}},
        {}, {"strategy": "ddp", "batch": 24, "batch.micro": 3, "precision": "fp16", "clip": 1.0, "optim": "adamw", "optim.lr": 3e-5, "optim.weight_decay": 0.0},
        ["optimizer.params.bias_correction"]),
    Row(f"{EXAMPLES} training/BingBertSquad/1-bit_adam/nccl/deepspeed_onebitadam_bsz96_config.json",
        {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 1.0, "fp16": {"enabled": True},
         "optimizer": {"type": "OnebitAdam", "params": {"lr": 3e-5, "freeze_step": 400, "weight_decay": 0.0, "bias_correction": False, "cuda_aware": False}}},
        {"optim": "adamw", "optim.lr": 3e-5, "optim.weight_decay": 0.0, "optim.betas": "[0.9,0.999]"},
        {"strategy": "ddp", "batch": 96, "batch.micro": 3, "precision": "fp16", "clip": 1.0, "optim": "adamw", "optim.lr": 3e-5},
        ["optimizer.type"]),
    Row(f"{EXAMPLES} training/autotuning/hf/dsconfigs/ds_config_fp16_z3.json",
        {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}, "fp16": {"enabled": True}},
        {"microbatch": 2}, {"strategy": "zero3", "batch.micro": 2, "precision": "fp16", "clip": None}),
    Row(f"{EXAMPLES} training/autotuning/hf/dsconfigs/ds_config_z1.json",
        {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}},
        {"microbatch": 2}, {"strategy": "zero1", "batch.micro": 2, "precision": "fp32", "clip": None}),
    Row(f"{EXAMPLES} training/bing_bert/deepspeed_bsz64k_lamb_config_seq128.json",
        {"train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "gradient_clipping": 1.0, "fp16": {"enabled": True, "loss_scale": 0},
         "optimizer": {"type": "Lamb", "params": {"lr": 0.011, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01}},
         "sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4}},
        {"optim": "muon", "optim.lr": 0.02, "optim.weight_decay": 0.01},
        {"strategy": "ddp", "batch": 65536, "batch.micro": 64, "precision": "fp16", "clip": 1.0, "optim": "muon", "optim.lr": 0.02},
        ["optimizer.type", "sparse_attention.mode"]),
    Row(f"{EXAMPLES} training/bing_bert/deepspeed_bsz4k_progressive_layer_drop_config_seq128.json",
        {"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 16, "prescale_gradients": True, "gradient_predivide_factor": 8, "gradient_clipping": 1.0,
         "optimizer": adam(1e-3, weight_decay=0.01, bias_correction=False), "fp16": {"enabled": True, "loss_scale": 0},
         "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}},
        {}, {"strategy": "ddp", "batch": 4096, "batch.micro": 16, "precision": "fp16", "clip": 1.0, "optim": "adamw", "optim.lr": 1e-3, "optim.weight_decay": 0.01},
        ["progressive_layer_drop.theta"]),
    Row(f"{EXAMPLES} training/gan/gan_deepspeed_config.json",
        {"train_batch_size": 64, "optimizer": adam(2e-4, betas=[0.5, 0.999], eps=1e-8)},
        {}, {"strategy": "ddp", "batch": 64, "batch.accumulate": 1, "precision": "fp32", "clip": None, "optim": "adamw", "optim.lr": 2e-4, "optim.betas": [0.5, 0.999],
             "optim.weight_decay": 0.0, "schedule": "constant", "schedule.warmup": 0}),
    Row(f"{EXAMPLES} training/imagenet/config/ds_fp16_z1_config.json",
        {"train_batch_size": 256, "gradient_accumulation_steps": 1, "optimizer": adam(1e-3, **CIFAR), "zero_optimization": {"stage": 1}, "gradient_clipping": 0,
         "fp16": {"enabled": True, "auto_cast": True}, "cuda_visible_devices": 0},
        {}, {**ADAMW, "strategy": "zero1", "batch": 256, "batch.accumulate": 1, "precision": "fp16", "clip": None, "optim.lr": 1e-3},
        ["cuda_visible_devices"]),
    Row(f"{EXAMPLES} training/pipeline_parallelism/ds_config.json",
        {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 8, "optimizer": adam(1e-3, betas=[0.9, 0.999], eps=1e-8)},
        {}, {"batch": 256, "batch.micro": 8, "precision": "fp32", "clip": None, "optim": "adamw", "optim.lr": 1e-3, "optim.weight_decay": 0.0}),
    Row("axolotl-ai-cloud/axolotl deepspeed_configs/zero1.json",
        {**AUTO, "zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", **AXOLOTL}},
        {**SIZES, "precision": "bf16"}, {**BATCH, "strategy": "zero1", "precision": "bf16"}),
    Row("axolotl-ai-cloud/axolotl deepspeed_configs/zero1_torch_compile.json",
        {**AUTO, "zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", **AXOLOTL}, "compile": {"disable": False, "backend": "inductor"}},
        {**SIZES, "precision": "fp16"}, {**BATCH, "strategy": "zero1", "precision": "fp16"}, ["compile.backend"]),
    Row("axolotl-ai-cloud/axolotl deepspeed_configs/zero2.json",
        {**AUTO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", **AXOLOTL}},
        {**SIZES, "precision": "bf16"}, {**BATCH, "strategy": "zero2", "offload": "cpu", "precision": "bf16"}),
    Row("axolotl-ai-cloud/axolotl deepspeed_configs/zero3_bf16_cpuoffload_params.json",
        {**AUTO, "zero_optimization": {"stage": 3, "offload_param": CPU, "sub_group_size": 0, "reduce_bucket_size": "auto"}, "bf16": {"enabled": True}},
        SIZES, {**BATCH, "strategy": "zero3", "offload": "cpu", "precision": "bf16"}),
    Row("hiyouga/LLaMA-Factory examples/deepspeed/ds_z0_config.json",
        {**AUTO, "zero_optimization": {"stage": 0, "round_robin_gradients": True}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", **SCALE}},
        {**SIZES, "precision": "fp32"}, {**BATCH, "strategy": "ddp", "precision": "fp32"}),
    Row("hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_autotp_config.json",
        {**AUTO, "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", **SCALE}, "tensor_parallel": {"autotp_size": 2}},
        {**SIZES, "precision": "bf16"}, {**BATCH, "strategy": "zero2", "mesh.tp": 2, "precision": "bf16"}),
    Row("hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_offload_config.json",
        {**AUTO, "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", **SCALE}},
        {**SIZES, "precision": "bf16"}, {**BATCH, "strategy": "zero3", "offload": "cpu", "precision": "bf16"}),
    Row("huggingface/accelerate examples/deepspeed_config_templates/zero_stage1_config.json",
        {"fp16": {"enabled": True, **SCALE}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}},
         "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
         "zero_optimization": {"stage": 1}, **AUTO, "gradient_accumulation_steps": 1},
        {"batch": 8, "clip": 1.0, "steps": 90, "optim.lr": 1e-4, "optim.weight_decay": 0.01, "schedule.warmup": 10},
        {"strategy": "zero1", "batch": 8, "batch.accumulate": 1, "precision": "fp16", "scale": [65536, 1000], "clip": 1.0, "optim": "adamw", "optim.lr": 1e-4,
         "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.01, "schedule": "linear", "schedule.warmup": 10, "schedule.floor": 0.0, "steps": 90}),
    Row("huggingface/accelerate examples/alst_ulysses_sequence_parallelism/sp-alst.ds-config.json",
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 1, "train_batch_size": "auto",
         "train_micro_batch_size_per_gpu": "auto", "seq_parallel_communication_data_type": "bf16"},
        {"batch": 8}, {"strategy": "zero3", "batch": 8, "batch.accumulate": 1, "precision": "bf16", "clip": None}, ["seq_parallel_communication_data_type"]),
]  # fmt: skip

FSDP1 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_cpu_ram_efficient_loading": True, "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_use_orig_params": True,
}  # fmt: skip
FSDP2 = {
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_version": 2,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
LOCAL = {
    "compute_environment": "LOCAL_MACHINE",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


def degrees(cp: int, replicate: int, shard: int, tp: int) -> dict[str, int]:
    said = {"cp_size": cp, "dp_replicate_size": replicate, "dp_shard_size": shard, "tp_size": tp}
    return {f"parallelism_config_{name}": size for name, size in said.items()}


ACCELERATE = [
    Row("hiyouga/LLaMA-Factory examples/accelerate/fsdp2_config.yaml",
        {**LOCAL, "distributed_type": "FSDP", "fsdp_config": FSDP2, "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2},
        {"batch": 16}, {"strategy": "fsdp", "reshard": "forward", "nodes": 1, "devices": 2, "precision": "bf16", "batch": 16}),
    Row("hiyouga/LLaMA-Factory examples/accelerate/fsdp_config_multiple_nodes.yaml",
        {**LOCAL, "distributed_type": "FSDP", "fsdp_config": FSDP1, "mixed_precision": "bf16", "num_machines": 2, "num_processes": 16,
         "main_process_ip": "192.168.0.1", "main_process_port": 29500},
        {"batch": 64}, {"strategy": "fsdp", "reshard": "forward", "nodes": 2, "devices": 8, "precision": "bf16", "batch": 64}),
    Row("hiyouga/LLaMA-Factory examples/accelerate/fsdp_config_offload.yaml",
        {**LOCAL, "distributed_type": "FSDP", "fsdp_config": {**FSDP1, "fsdp_offload_params": True}, "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2},
        {"batch": 16}, {"strategy": "fsdp", "offload": "cpu", "devices": 2, "precision": "bf16", "batch": 16}),
    Row("huggingface/accelerate examples/config_yaml_templates/multi_gpu.yaml",
        {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 2},
        {"batch": 16}, {"strategy": "ddp", "devices": 2, "precision": "bf16", "batch": 16}),
    Row("huggingface/accelerate examples/config_yaml_templates/multi_node.yaml",
        {"distributed_type": "MULTI_GPU", "machine_rank": 0, "main_process_ip": "1234", "main_process_port": 9999, "num_machines": 2, "num_processes": 8,
         "rdzv_backend": "static", "same_network": False},
        {"batch": 16}, {"strategy": "ddp", "nodes": 2, "devices": 4, "precision": "fp32", "batch": 16}),
    Row("huggingface/accelerate examples/config_yaml_templates/multi_xpu.yaml",
        {"distributed_type": "MULTI_XPU", "mixed_precision": "bf16", "num_processes": 2},
        {"batch": 16}, {"devices": 2, "precision": "bf16", "batch": 16}, ["distributed_type"]),
    Row("huggingface/accelerate examples/config_yaml_templates/single_accelerator.yaml",
        {"distributed_type": "NO", "mixed_precision": "bf16"}, {}, {"strategy": "single", "precision": "bf16"}),
    Row("huggingface/accelerate examples/torch_native_parallelism/configs/cp.yaml",
        {**LOCAL, "distributed_type": "FSDP", "fsdp_config": {**FSDP2, "fsdp_activation_checkpointing": True}, "mixed_precision": "bf16", "num_machines": 1,
         "num_processes": 8, "parallelism_config": degrees(8, 1, 1, 1)},
        {"batch": 4}, {"strategy": "fsdp", "mesh.cp": 8, "mesh.dp_shard": 1, "devices": 8, "remat": "full", "precision": "bf16", "batch": 4}),
    Row("huggingface/accelerate examples/torch_native_parallelism/configs/tp_hsdp.yaml",
        {**LOCAL, "distributed_type": "FSDP", "fsdp_config": FSDP2, "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8,
         "parallelism_config": degrees(1, 2, 2, 2)},
        {"batch": 8}, {"strategy": "hsdp", "mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.tp": 2, "devices": 8, "precision": "bf16", "batch": 8}),
    Row("huggingface/accelerate tests/test_configs/0_28_0_mpi.yaml",
        {**LOCAL, "distributed_type": "MULTI_CPU", "mixed_precision": "no", "num_machines": 4, "num_processes": 16, "main_process_ip": "127.0.0.1",
         "main_process_port": 29500, "mpirun_config": {"mpirun_hostfile": "/home/user/hostfile"}, "use_cpu": True},
        {"batch": 16}, {"strategy": "ddp", "nodes": 4, "devices": 4, "backend": "gloo", "precision": "fp32", "batch": 16}, ["mpirun_config.mpirun_hostfile"]),
]  # fmt: skip
