"""Our keys and values by the names that other tools have for them: `learning_rate` is optim.lr, asha is halving."""

ELSEWHERE = {
    "epochs": "num_epochs max_epochs train_epochs num_train_epochs n_epochs",
    "steps": "max_steps train_steps total_steps iterations iters max_iters num_steps",
    "batch": "batch_size global_batch_size train_batch_size bs",
    "microbatch": "micro_batch_size micro_batch micro_batch_size_per_gpu per_device_train_batch_size "
        "train_micro_batch_size_per_gpu local_batch_size",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches grad_accum gradient_accumulation "
        "accumulation_steps",
    "optim.lr": "learning_rate learningrate", "optim.weight_decay": "wd decay",
    "schedule.warmup": "warmup_steps warmup_ratio "
        "warmup_iters lr_warmup_steps",
    "clip": "max_grad_norm gradient_clip_val gradient_clipping grad_clip clip_grad_norm max_norm",
    "schedule": "scheduler lr_scheduler "
        "lr_scheduler_type",
    "devices": "gpus num_gpus ngpus n_gpus gpus_per_node nproc_per_node nproc num_processes accelerator",
    "optim": "optimizer",
    "nodes": "num_nodes nnodes num_machines", "out": "output output_dir save_dir logdir log_dir run_dir",
    "log.every": "logging_steps log_every_n_steps "
        "log_interval",
    "checkpoint.every": "save_steps save_interval save_every checkpoint_interval",
    "evaluate.every": "eval_steps eval_interval eval_every "
        "val_interval",
    "data.workers": "num_workers dataloader_num_workers", "data.sequence": "seq_len seq_length sequence_length "
        "max_seq_length max_seq_len block_size context_length",
    "data.path": "train_file data_dir dataset_path data_path", "precision": "bf16 fp16 mixed_precision amp",
    "remat": "gradient_checkpointing "
        "activation_checkpointing",
    "model.layers": "num_layers n_layers n_layer num_hidden_layers depth",
    "model.width": "hidden_size d_model n_embd embed_dim "
        "dim", "model.heads": "num_heads n_heads n_head",
    "model.vocab": "vocab_size", "mesh.tp": "tensor_parallel_size tensor_parallel tp_size",
    "mesh.pp": "pipeline_parallel_size "
        "pipeline_parallel pp_size",
    "mesh.cp": "context_parallel_size context_parallel cp_size", "mesh.ep": "expert_parallel_size expert_parallel "
        "ep_size",
    "fork": "fork_from branch_from continue_from",
    "init": "resume_from_checkpoint load_checkpoint ckpt_path pretrained", "seed": "random_seed manual_seed",
    "time_limit": "max_time timeout walltime",
    "recipe": "config config_name config_file cfg_path", "hydra.searchpath": "config_dir config_path",
    "data": "dataset", "trust": "trust_remote_code",
}  # fmt: skip
"""Our key -> its names in other tools."""
OURS = {name: key for key, names in ELSEWHERE.items() for name in names.split()}
MEANT = {
    "sweep.search": {"bayes": "tpe", "bayesian": "tpe", "optuna": "tpe", "hyperopt": "tpe", "cma": "cmaes"},
    "sweep.stop": dict.fromkeys(("asha", "hyperband", "sha", "successive_halving"), "halving") | {"pbt": "population"},
}
"""Our key -> the names of its values in other tools, and ours."""
LACKING = {
    ("adapter", "qdora"): "a base in 4 bits takes LoRA alone. Type adapter=qlora, or adapter=dora precision=bf16_true.",
}
"""(group, word of other tools) -> a sentence about what is not there, and what to type."""
