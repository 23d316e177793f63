"""Our keys and values by the names that other tools have for them: `learning_rate` is optim.lr, asha is halving. The
one table of the command line and of `dtrain import`; dtrain/config/meaning.py reads it.

A text of the table is our value, or words to type (they have a `=`), or a sentence (it ends with a full stop). `{}` is
the value that was typed.
"""

from collections.abc import Mapping

from dtrain.config.answers import (
    LOGGERS,
    OF_HUB,
    OF_IMAGES,
    OWN_MODEL,
    OWN_OPTIM,
    OWN_SCHEDULE,
    RESUMED,
    STAGES,
    TO_ZERO,
)

# fmt: off
ELSEWHERE = {
    "epochs": "num_epochs max_epochs max_epoch train_epochs num_train_epochs n_epochs nb_epochs total_epochs",
    "steps": "max_steps train_steps total_steps iterations iters max_iters num_steps n_steps train_iters max_iter "
        "num_train_steps max_train_steps training_steps total_training_steps max_update max_updates num_iterations "
        "total_iters",
    "batch": "batch_size global_batch_size train_batch_size bs total_batch_size global_train_batch_size batchsize",
    "microbatch": "micro_batch_size micro_batch micro_batch_size_per_gpu per_device_train_batch_size "
        "train_micro_batch_size_per_gpu local_batch_size per_gpu_train_batch_size device_batch_size "
        "device_train_microbatch_size batch_size_per_gpu batch_size_per_device per_device_batch_size",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches grad_accum gradient_accumulation "
        "accumulation_steps grad_accum_steps grad_accumulation_steps update_freq accum_iter num_microbatches",
    "optim.lr": "lr learning_rate learningrate base_lr max_lr peak_lr init_lr initial_learning_rate lr_max",
    "optim.weight_decay": "wd decay weightdecay",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "schedule.warmup": "warmup_steps warmup_ratio warmup_iters lr_warmup_steps lr_warmup_iters num_warmup_steps "
        "warmup_updates warmup_fraction warmup_proportion lr_warmup_fraction warmup_num_steps lr_warmup",
    "clip": "max_grad_norm gradient_clip_val gradient_clipping grad_clip clip_grad_norm max_norm clip_norm clip_grad "
        "clipnorm global_clipnorm grad_norm_clip gradient_clip grad_clip_norm max_gradient_norm grad_norm",
    "schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style sched lr_scheduler_name lr_decay",
    "devices": "gpus num_gpus ngpus n_gpus gpus_per_node nproc_per_node nproc num_processes num_devices n_devices "
        "ntasks_per_node num_procs ngpus_per_node",
    "optim": "optimizer opt optimizer_name optimizer_type optim_name",
    "nodes": "num_nodes nnodes num_machines n_nodes nnode",
    "out": "output output_dir save_dir logdir log_dir run_dir default_root_dir out_dir save_folder work_dir workdir "
        "project_dir results_dir result_dir model_dir exp_dir outdir checkpoint_dir ckpt_dir hydra.run.dir "
        "checkpoint_folder save_path",
    "sweep.out": "hydra.sweep.dir",
    "log.every": "logging_steps log_every_n_steps log_interval log_freq print_freq log_every steps_per_print "
        "logging_interval log_steps print_every",
    "checkpoint.every": "save_steps save_interval save_every checkpoint_interval checkpointing_steps save_freq "
        "every_n_train_steps save_every_n_steps save_interval_updates ckpt_interval",
    "checkpoint.keep": "save_total_limit keep_last_n_checkpoints save_num_checkpoints_to_keep "
        "checkpoints_total_limit max_to_keep num_to_keep total_limit keep_last keep_checkpoints",
    "evaluate.every": "eval_steps eval_interval eval_every val_interval val_check_interval run_val_every_n_steps "
        "eval_freq validation_steps val_every validate_interval valid_interval",
    "data.holdout": "validation_split val_split val_set_size val_fraction test_split val_ratio val_size test_size",
    "data.workers": "num_workers dataloader_num_workers",
    "data.sequence": "seq_len seq_length sequence_length max_seq_length max_seq_len block_size context_length "
        "sequence_len ctx_len n_ctx max_sequence_length max_length",
    "data.path": "train_file data_dir dataset_path data_path train_data train_path data_root train_data_path",
    "data.column": "text_column text_field dataset_text_field",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "precision": "mixed_precision",
    "model.layers": "num_layers n_layers n_layer num_hidden_layers depth",
    "model.width": "hidden_size d_model n_embd embed_dim dim hidden_dim",
    "model.heads": "num_heads n_heads n_head num_attention_heads nhead",
    "model.vocab": "vocab_size",
    "mesh.tp": "tensor_parallel_size tensor_parallel tp_size tensor_model_parallel_size tensor_parallel_degree "
        "tp_degree",
    "mesh.pp": "pipeline_parallel_size pipeline_parallel pp_size pipeline_model_parallel_size "
        "pipeline_parallel_degree pp_degree num_stages pipeline_stages",
    "mesh.cp": "context_parallel_size context_parallel cp_size context_parallel_degree sequence_parallel_size "
        "sp_size sequence_parallel_degree",
    "mesh.ep": "expert_parallel_size expert_parallel ep_size expert_model_parallel_size expert_parallel_degree",
    "mesh.dp_shard": "data_parallel_shard_degree dp_shard_size fsdp_size",
    "mesh.dp_replicate": "data_parallel_replicate_degree dp_replicate_size",
    "fork": "fork_from branch_from continue_from",
    "init": "load_checkpoint load_path init_checkpoint pretrained_path load_weights finetune_from weights_path "
        "load_from_checkpoint pretrained_checkpoint",
    "seed": "random_seed manual_seed seed_everything global_seed random_state torch_seed set_seed",
    "time_limit": "max_time timeout walltime max_duration_hours",
    "recipe": "config config_name config_file cfg_path config_yaml",
    "data": "dataset datamodule dataset_name",
    "ema": "ema_decay ema_rate ema_beta",
    "launcher.restarts": "max_restarts max_failures",
    "objective.beta": "dpo_beta rl_beta",
    "adapter.dropout": "lora_dropout",
}
"""Our key -> its names in other tools, with the same values."""
OURS: Mapping[str, str] = {name: key for key, names in ELSEWHERE.items() for name in names.split()}
VALUES: Mapping[str, Mapping[str, str]] = {
    "sweep.search": {"bayes bayesian optuna hyperopt": "tpe", "cma": "cmaes"},
    "sweep.stop": {"asha hyperband sha successive_halving": "halving", "pbt": "population"},
    **{
        key: {"none null never false off -1": f"Type {key}=0, for the last step alone."}
        for key in ("evaluate.every", "checkpoint.every")
    },
    "resume": {"true yes 1": "auto", "false no 0": "never", "force required": "must", "/": RESUMED},
    "clip": {"0 0.0 none": "null"}, "ema": {"true": "0.999", "false": "null"},
    "checkpoint": {"last latest best newest": RESUMED, "/": RESUMED},
    "strategy": {
        "deepspeed zero": f"{STAGES} Type one of them.",
        "deepspeed_stage_1 zero_1 zero_stage_1 distributed_optimizer": "zero1",
        "deepspeed_stage_2 zero_2 zero_stage_2 ddp_sharded ddp_sharded_spawn sharded": "zero2",
        "deepspeed_stage_3 zero_3 zero_stage_3": "zero3", "deepspeed_stage_2_offload": "strategy=zero2 "
            "strategy.offload=cpu",
        "deepspeed_stage_3_offload": "strategy=zero3 strategy.offload=cpu",
        "deepspeed_stage_3_offload_nvme": "There is no offload to disk. Type strategy=zero3 strategy.offload=cpu.",
        "dp horovod bagua ddp_spawn ddp_fork ddp_notebook ddp_static_graph ddp_find_unused_parameters_true "
            "ddp_find_unused_parameters_false ddp_find_unused_parameters_false_spawn data_parallel distributed "
            "no_shard mirrored mirroredstrategy multi_gpu distributeddataparallel": "ddp",
        "fsdp_native fsdp1 fsdp2 full_shard fully_sharded ddp_fully_sharded fully_shard fairscale "
            "sharded_data_parallel fsdp_cpu_offload fsdp_native_full_shard_offload": "fsdp",
        "shard_grad_op": "strategy=fsdp strategy.reshard=never", "hybrid_shard": "hsdp",
        "single_device none no null": "single", "pp gpipe pipe": "pipeline",
        "tp tensor_parallel model_parallel megatron megatron_lm": "Tensor parallelism is an axis of the mesh. Type "
            "strategy=fsdp mesh.tp=2.",
        "xla tpu single_tpu": "dtrain does not run on TPUs. Leave it out.",
    },
    "precision": {
        "16 16-mixed fp16-mixed half float16 mixed_float16 amp_fp16": "fp16",
        "bf16-mixed bfloat16 mixed_bfloat16 amp_bf16 amp mixed true": "bf16", "bf16-true bfloat16-true": "bf16_true",
        "32 32-true single float32 full no none false highest": "fp32", "high medium": "tf32",
        "amp_fp8 transformer-engine float8": "fp8", "16-true": "There are no weights in fp16. Type precision=fp16, "
            "or precision=bf16_true.",
        "64 64-true double float64": "There is no training in 64 bits. Type precision=fp32.",
        "int8 8bit 4bit int4": "Weights are not quantised for training. Type precision=bf16, or adapter=qlora with "
            "model=hf.",
    },
    "remat": {"true full_checkpoint": "full", "false no off": "none", "partial": "selective"},
    "compile": {"true inductor default": "blocks", "false off no": "none", "reduce-overhead "
        "max-autotune": "compile=blocks compile.mode={}"},
    "backend": {"cuda rccl": "nccl", "cpu ccl": "gloo"},
    "launcher": {"torchrun torch_distributed elastic": "external", "submitit submitit_slurm srun sbatch": "slurm",
                 "mpirun openmpi horovodrun": "mpi", "k8s pytorchjob": "kubernetes", "pdsh": "ssh",
                 "joblib submitit_local spawn fork process multiprocessing": "local"},
    "optim": {
        "adam adamw_torch adamw_torch_fused adamw_hf fusedadam adam_w fused_adam torch_adamw decoupled_adamw "
            "adamw_fused cpuadam": "adamw",
        "adamw_bnb_8bit adamw_8bit adamw_torch_8bit paged_adamw paged_adamw_8bit paged_adamw_32bit adamw8bit":
            "dtrain keeps the optimizer state in the type of the weights. Type optim=adamw, and strategy=fsdp or "
                "precision=bf16_true to save memory.",
        "sgd_nesterov momentum": "sgd", "lion lamb lars rmsprop adagrad adadelta nadam radam adamax lbfgs sophia "
            "shampoo adan galore_adamw ademamix lomo schedule_free_adamw soap prodigy adabelief apollo_adamw rprop "
            "asgd": OWN_OPTIM,
    },
    "schedule": {
        "polynomial inverse_sqrt step steplr multistep multisteplr exponential exponentiallr "
            "plateau reducelronplateau onecycle onecyclelr one_cycle cosine_with_restarts "
            "cosineannealingwarmrestarts cyclic cycliclr reduce_lr_on_plateau lambda": OWN_SCHEDULE,
        "cosineannealinglr cosine_annealing cosineannealing cosine_decay "
            "cosine_with_warmup cosine_warmup": TO_ZERO,
        "cosine_with_min_lr": "Type schedule=cosine schedule.floor=<min_lr / optim.lr>.",
        "constant_with_warmup warmuplr": "constant", "none no null false": "schedule=constant schedule.warmup=0",
        "warmup_stable_decay trapezoidal": "wsd",
        "warmupdecaylr linear_with_warmup linear_warmup linear_decay": "linear",
        "warmupcosinelr": "schedule=cosine schedule.floor=1e-4",
    },
    "model": {
        "bert roberta distilbert albert deberta electra gpt2 gpt-2 gptj gpt_neox llama llama2 llama3 mistral mixtral "
            "qwen qwen2 qwen3 gemma phi opt bloom falcon t5 bart vit clip whisper deit": OWN_MODEL,
        "resnet resnet18 resnet34 resnet50 resnet101 resnet152 vgg16 alexnet mobilenet densenet efficientnet unet "
            "convnext timm inception": "Type model=cnn, a small network for images; a class of your own is "
            "model._target_=<it> trust=[<its package>].",
        "transformer lm nanogpt": "gpt", "linear simple_dense_net dense": "mlp", "convnet simple_cnn": "cnn",
    },
    "data": {
        "mnist cifar cifar10 cifar100 imagenet fashion_mnist fashionmnist svhn celeba coco": OF_IMAGES,
        "imagefolder image_folder folder": "data=images data.path=<folder of class folders>",
        "imdb glue sst2 mrpc squad alpaca c4 openwebtext wikitext wikitext-2 wikitext-103 ag_news yelp dolly oasst1 "
            "fineweb ultrachat": OF_HUB,
        "json ndjson": "data=jsonl data.path=<files> data.targets=<column>", "huggingface datasets "
            "hf_datasets": OF_HUB, "txt": "text",
        "sharegpt messages conversation sft": "data=chat data.path=<rows> data.tokenizer=<name>", "bin memmap npy "
            "mmap": "tokens",
        "random fake dummy": "synthetic", "wds": "webdataset",
    },
    "data.targets": {
        "[": "A row has one column of the target. Type data.targets=<column>; in data=jsonl, parquet or hf it may hold "
            "a list of several numbers.",
    },
    "logger": {
        "neptune clearml dvclive swanlab many_loggers all json jsonl rich": LOGGERS, "weightsandbiases wb "
        "wandblogger": "logger=[wandb]", "mlflowlogger": "logger=[mlflow]", "csvlogger": "logger=[csv]", "comet_ml "
        "cometlogger": "logger=[comet]", "tensorboardlogger tb": "logger=[tensorboard]", "tqdm "
        "progress": "logger=[console]",
    },
    "objective": {"cross_entropy crossentropy ce nll bce": "classification", "mse mae l1 huber": "regression",
                  "sft causal_lm clm lm language_modeling": "next_token", "mlm masked_lm": "masked", "kd "
                      "distillation": "distill"},
    "adapter": {
        "qdora": "A base in 4 bits takes LoRA alone. Type adapter=qlora, or adapter=dora precision=bf16_true.",
        "peft rslora": "lora", "ia3 prefix prefix_tuning prompt_tuning adalora vera": "There is no adapter {}. Type "
            "adapter=lora or adapter=dora.",
        "null false no full": "none",
    },
}
# fmt: on
MEANT: Mapping[str, Mapping[str, str]] = {
    key: {name: text for names, text in table.items() for name in names.split()} for key, table in VALUES.items()
}
"""Our key -> the names of its values in other tools, in lower case, and what is typed here."""
VERBS = {
    "fit": "train", "tune": "train", "launch": "train", "finetune": "train", "sft": "train", "pretrain": "train",
    "test": "evaluate", "validate": "evaluate", "eval": "evaluate", "validation": "evaluate", "infer": "predict",
    "inference": "predict", "show": "plan", "config": "plan", "info": "plan", "list": "runs", "ls": "runs",
    "env": "doctor",
    "init": "new", "create": "new", "convert": "import", "chat": "generate", "sample": "generate",
    "export": "checkpoint",
    "status": "runs", "dry-run": "plan", "estimate": "plan", "estimate-memory": "plan",
}  # fmt: skip
"""Verb of other tools -> ours."""
