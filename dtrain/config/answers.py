"""The answers to words of other tools that have another meaning or form than ours: a part of the table
of dtrain/config/elsewhere.py, which says how its texts are read.
"""

from collections.abc import Mapping

OTHER = "*"
"""Stands for every other value."""
PART = "0.*"
"""Stands for every number between 0 and 1."""

# fmt: off
RESUMED = (
    "A run goes on from its newest checkpoint: type the words of the run again, with the same out=<its folder>. "
        "init=<weights> begins a new run from weights."
)
RECIPE = "A complete run is a recipe. Type recipe=<its file or name>; dtrain recipes lists those that come with dtrain."
LOGGERS = (
    "There are the loggers console, tensorboard, wandb, mlflow, trackio, aim, comet and csv, and metrics.jsonl is "
        "always written. Type logger=[console] and those you want; one of your own is logger.mine._target_=<its class> "
        "trust=[<its package>]."
)
WANDB, MLFLOW = "logger=[console,wandb]", "logger=[console,mlflow]"
SMALL = "Type steps=2, or dtrain verify with the same words, which runs a few steps, stops and resumes."
EARLY = "stop.metric=eval_loss stop.patience="
STAGES = "The stages of ZeRO are strategy=zero1, strategy=zero2 and strategy=zero3."
OF_DEEPSPEED = {
    "true": f"{STAGES} Type one of them.", "false": "strategy=ddp", "zero1": "strategy=zero1",
    OTHER: f"{STAGES} Type dtrain import {{}} to=mine.yaml, and then recipe=mine.yaml.",
}
GPU_TOO = "A GPU is used where there is one. Leave it out, or type devices=<processes per node>."
RANKS = "The launcher numbers nodes and ranks. Leave it out."
ADDRESS = "Type launcher=local launcher.here=1 launcher.address=<host>:<port>; torchrun, srun and mpirun set their own."
HOSTS = "Type launcher=ssh launcher.hosts=[<host>,<host>] nodes=2."
LOADING = "Samples are loaded ahead and split over the ranks by index. Leave it out."
KERNELS = "torch chooses the kernels. Leave it out."
OWN_OPTIM = (
    "Type optim=adamw, optim=sgd, optim=muon or optim=adafactor; one of your own is optim._target_=<a function of the "
        "model> trust=[<its package>]."
)
OWN_SCHEDULE = (
    "Type schedule=cosine, linear, constant or wsd, which is flat and ends in a linear decay; one of your own is "
        "schedule._target_=<its class> trust=[<its package>]."
)
TO_ZERO = "schedule=cosine schedule.floor=0"
OWN_MODEL = (
    "Type model=hf model.name=<its name at Hugging Face, or its folder>; a class of your own is model._target_=<it> "
        "trust=[<its package>]."
)
OF_HUB = (
    "Type data=hf data.path=<its folder after save_to_disk> data.targets=<column>, or data=text data.path=<files>."
)
OF_IMAGES = (
    "Type data=images data.path=<folder of class folders> model=cnn; a dataset class is data=dataset "
        "data.dataset._target_=<it> trust=[<its package>]."
)
OFFLOADED = {
    "nvme": "There is no offload to disk. Type strategy=fsdp strategy.offload=cpu.", "none": "strategy=fsdp",
    "false": "strategy=fsdp", OTHER: "strategy=fsdp strategy.offload=cpu",
}
ADAPTER = "Type adapter=lora adapter.rank=<rank> adapter.alpha=<alpha> model=hf model.name=<name>."
IN_BITS = "Type adapter=qlora model=hf model.name=<name>: the base in 4 bits, an adapter beside it."
EXPORTED = "Type dtrain checkpoint export out=<run> to=hf://<organisation>/<name> after training."
OWN_CODE = (
    "Code of a repository is not run. Install its package and type model._target_=<its class> trust=[<its package>]."
)
SHOWN = "dtrain plan shows what a run would be, and <out>/config.yaml has all of its values. Type dtrain plan <words>."
SPEED = "There is no profiler during training; metrics.jsonl has the seconds of each step. Leave it out."
OFF = "It is off here too. Leave it out."
NAMED = "A run is called by its folder. Type out=runs/{}."
BY_STEPS = {
    name: {"no": f"{name}=0", "epoch": f"{name}=epoch", OTHER: f"{name} counts steps. Type {name}=<steps>."}
    for name in ("evaluate.every", "checkpoint.every")
}
BY_EPOCHS = {
    name: {"1": f"{name}=epoch",
           OTHER: f"{name} counts steps. Type {name}=<{{}} x samples / batch>."}
    for name in ("evaluate.every", "checkpoint.every")
}
BEST_IS = (
    "A metric says itself what is better; for one that does not, type checkpoint.best_is={} beside checkpoint.best."
)
BEST = {
    **{f"{of}{name}": f"checkpoint.best=eval_{name}" for of in ("", "eval_", "val_") for name in ("loss", "accuracy")},
    **dict.fromkeys(("acc", "eval_acc", "val_acc"), "checkpoint.best=eval_accuracy"),
    **{f"{of}{name}": f"evaluate.metrics=[{name}] checkpoint.best=eval_{name}"
       for of in ("", "eval_", "val_") for name in ("f1", "auroc", "top5", "perplexity")},
    OTHER: "Type checkpoint.best=eval_<name of a metric>; metrics beside those of the objective are "
        "evaluate.metrics=[<metric>].",
}

SAYINGS: Mapping[str, str | Mapping[str, str]] = {
    # batches, epochs, the end of a run
    "batch_size": "Type batch={} for the samples of a step over all ranks, or microbatch={} for one rank.",
    "eval_batch_size per_device_eval_batch_size val_batch_size test_batch_size batch_size_val": "Evaluation uses the "
        "microbatch. Leave it out.",
    "steps_per_epoch limit_train_batches max_steps_per_epoch": {
        "1.0": "An epoch is all samples. Leave it out.",
        PART: "A run ends at its steps. Type steps=<epochs x {} x samples / batch>, or epochs=<{} x epochs>.",
        OTHER: "A run ends at its steps. Type steps=<epochs x {}>.",
    },
    "max_duration": "Type steps=<optimizer steps>, or epochs=<passes> for data that states its length.",
    "min_epochs min_steps": "A run ends at its steps. Leave it out.",
    "max_tokens": "Type steps=<{} / batch / data.sequence>.",
    "fast_dev_run dry_run dryrun smoke_test debug debug_mode": SMALL,
    "overfit_batches overfit": "Type data.holdout=0 with a dataset of a few samples.",
    "auto_find_batch_size auto_scale_batch_size find_batch_size autotuning": "dtrain plan shows what fits. Type "
        "strategy=auto, which chooses the microbatch too.",
    # optimizer and schedule
    "auto_lr_find lr_find lr_finder": "Type dtrain -m optim.lr=1e-4,3e-4,1e-3 steps=100.",
    "adam_beta1 beta1": "Type optim.betas=[{},<beta2>].", "adam_beta2 beta2": "Type optim.betas=[<beta1>,{}].",
    "min_lr lr_min eta_min cosine_min_lr_ratio min_learning_rate end_lr": "The last rate is a part of the first. "
        "Type schedule.floor=<{} / optim.lr>.",
    "lr_scheduler_type": {"cosine": TO_ZERO},
    "lr_decay_iters lr_decay_steps t_max decay_steps": "The decay ends with the run. Leave it out, or type "
        "schedule=wsd schedule.decay=<steps>.",
    "gradient_clip_algorithm clip_value clipvalue clip_grad_value": "Gradients are clipped by their norm. Type "
        "clip=1.0.",
    "swa stochastic_weight_avg stochastic_weight_averaging use_ema model_ema": "dtrain keeps an exponential average "
        "of the weights. Type ema=0.999.",
    "loss criterion loss_fn loss_function task problem_type stage": {
        "mse": "objective=regression", "mae": "objective=regression", "l1": "objective=regression",
        "regression": "objective=regression", "classification": "objective=classification",
        "cross_entropy": "objective=classification", "ce": "objective=classification",
        "categorical_crossentropy": "objective=classification",
        "sparse_categorical_crossentropy": "objective=classification",
        "single_label_classification": "objective=classification",
        "causal_lm": "objective=next_token", "clm": "objective=next_token", "sft": "data=chat data.path=<rows> "
            "data.tokenizer=<name>",
        "pt": "objective=next_token", "masked_lm": "objective=masked", "mlm": "objective=masked",
        "dpo": "objective=dpo",
        OTHER: "Type objective=classification, regression, next_token, masked, dpo or distill; one of your own is "
            "objective._target_=<its class> trust=[<its package>].",
    },
    "label_smoothing_factor label_smoothing": "Labels of classes are not smoothed; those of pairs are by "
        "objective=dpo objective.label_smoothing={}. Leave it out, or type "
        "objective._target_=<your loss> trust=[<its package>].",
    "warmup_epochs num_warmup_epochs lr_warmup_epochs": "schedule.warmup counts steps, or is a part of the run below "
        "1. Type schedule.warmup=<{} x samples / batch>.",
    # evaluation, checkpoints, stopping
    "check_val_every_n_epoch validation_freq": BY_EPOCHS["evaluate.every"],
    "every_n_epochs save_every_n_epochs": BY_EPOCHS["checkpoint.every"],
    "evals_per_epoch": {
        "1": "evaluate.every=epoch",
        OTHER: "evaluate.every counts steps. Type evaluate.every=<samples / batch / {}>.",
    },
    "saves_per_epoch": {
        "1": "checkpoint.every=epoch",
        OTHER: "checkpoint.every counts steps. Type checkpoint.every=<samples / batch / {}>.",
    },
    "val_check_interval": {"1.0": BY_EPOCHS["evaluate.every"]["1"], PART: BY_EPOCHS["evaluate.every"][OTHER]},
    "eval_steps": {PART: "evaluate.every counts steps. Type evaluate.every=<{} x steps>."},
    "save_steps": {PART: "checkpoint.every counts steps. Type checkpoint.every=<{} x steps>."},
    "logging_steps": {PART: "log.every counts steps. Type log.every=<{} x steps>."},
    "eval_strategy evaluation_strategy": BY_STEPS["evaluate.every"], "save_strategy": BY_STEPS["checkpoint.every"],
    "logging_strategy": "log.every counts steps. Type log.every=10.",
    "eval_samples": "evaluate.samples={}",
    "limit_val_batches eval_iters val_batches": {
        "0": "Type data.holdout=0, so that nothing is evaluated.", "1.0": "All held-out samples are evaluated. Leave "
            "it out.",
        PART: "Evaluation counts samples. Type evaluate.samples=<{} x held-out samples>.",
        OTHER: "Evaluation counts samples. Type evaluate.samples=<{} x microbatch>.",
    },
    "limit_test_batches limit_predict_batches num_sanity_val_steps": "A run only trains and evaluates its held-out "
        "data. Leave it out.",
    "metrics metric compute_metrics": "Type evaluate.metrics=[{}].",
    "save_top_k": {
        "-1": "checkpoint.keep=null", "0": "checkpoint.every=0",
        OTHER: "Type checkpoint.keep={} for the newest ones, and checkpoint.best=eval_loss for the best one beside "
            "them.",
    },
    "save_last enable_checkpointing save_safetensors": {
        "false": "The last step is always saved. Type checkpoint.every=0 for that one alone.",
        OTHER: "The newest checkpoints are always kept. Leave it out.",
    },
    "load_best_model_at_end save_best save_best_only": "The best checkpoint is <out>/best. Type "
        "checkpoint.best=eval_loss, or the figure of another metric.",
    "metric_for_best_model monitor": BEST,
    "greater_is_better mode monitor_mode": {
        "true": BEST_IS.format("highest"), "max": BEST_IS.format("highest"), "maximize": BEST_IS.format("highest"),
        "false": BEST_IS.format("lowest"), "min": BEST_IS.format("lowest"), "minimize": BEST_IS.format("lowest"),
        OTHER: "A metric says itself what is better. Leave it out, or type checkpoint.best_is=<lowest, highest> "
            "beside checkpoint.best.",
    },
    "early_stopping.mode": "A metric says itself what is better. Leave it out.",
    "early_stopping early_stop use_early_stopping": f"{EARLY}3",
    "early_stopping.patience early_stopping_patience patience": f"{EARLY}{{}}",
    "early_stopping.monitor": "Type stop.metric=eval_loss stop.patience=3.",
    "early_stopping.min_delta min_delta early_stopping_threshold": f"{EARLY}3 stop.least={{}}",
    "callbacks callback": {
        "early_stopping": f"{EARLY}3", "earlystopping": f"{EARLY}3", "model_checkpoint": "checkpoint.best=eval_loss",
        "modelcheckpoint": "checkpoint.best=eval_loss",
        OTHER: "Early stopping is stop.metric=eval_loss stop.patience=3, the best checkpoint "
            "checkpoint.best=eval_loss. For the rest write a hook, which observes: hook.mine._target_=<its class> "
            "trust=[<its package>].",
    },
    "ckpt resume_from_checkpoint ckpt_path resume_from resume_path resume_checkpoint load_dir": RESUMED,
    "auto_resume autoresume": {"false": "resume=never", OTHER: "resume=auto"},
    "overwrite_output_dir overwrite": "A run is never written over. Type out=<another place>.",
    # what is shown
    "use_wandb wandb wandb_log": {"false": "logger=[console]", OTHER: WANDB},
    "use_mlflow mlflow": {"false": "logger=[console]", OTHER: MLFLOW},
    "wandb_project": f"{WANDB} logger.wandb.project={{}}", "wandb_entity": f"{WANDB} logger.wandb.entity={{}}",
    "wandb_mode": f"{WANDB} logger.wandb.mode={{}}", "wandb_run_name wandb_name": f"{WANDB} logger.wandb.name={{}}",
    "wandb_group": f"{WANDB} logger.wandb.group={{}}",
    "mlflow_tracking_uri tracking_uri": f"{MLFLOW} logger.mlflow.uri={{}}",
    "mlflow_experiment_name": f"{MLFLOW} logger.mlflow.experiment={{}}",
    "neptune clearml": LOGGERS,
    "report_to logger_name log_with tracker": {
        "none": "logger=[console]", "tensorboard": "logger=[console,tensorboard]", "wandb": WANDB, "mlflow": MLFLOW,
        "comet_ml": "logger=[console,comet]", "comet": "logger=[console,comet]", "trackio": "logger=[console,trackio]",
        "aim": "logger=[console,aim]", OTHER: LOGGERS,
    },
    "tensorboard use_tensorboard": {"false": "logger=[console]", OTHER: "logger=[console,tensorboard]"},
    "enable_progress_bar progress_bar": {"false": "logger=[tensorboard]", OTHER: "The console shows it. Leave it out."},
    "disable_tqdm quiet silent": {"false": "The console shows it. Leave it out.", OTHER: "logger=[tensorboard]"},
    "verbose verbosity log_level loglevel": "Every step has a row in metrics.jsonl. Type log.every=1 for every step "
        "on the console.",
    "enable_model_summary model_summary summary": "dtrain plan shows the model and its memory. Leave it out.",
    "logging_dir tensorboard_dir": "Event files are under <out>/tensorboard. Type out=<URL>.",
    "profiler profile use_profiler": SPEED,
    "name run_name exp_name experiment_name task_name job_name": NAMED,
    "tags notes project project_name": "metrics.jsonl and plan.yaml say what a run was. Leave it out.",
    # numbers, kernels, memory
    "bf16 use_bf16 bf16.enabled": {"false": "precision=fp32", OTHER: "precision=bf16"},
    "fp16 use_fp16 half fp16.enabled": {"false": "precision=fp32", OTHER: "precision=fp16"},
    "fp8": "precision=fp8", "tf32 allow_tf32": {"false": "precision=fp32", OTHER: "precision=tf32"},
    "amp use_amp autocast amp_level amp_backend": {
        "false": "precision=fp32", "none": "precision=fp32", OTHER: "Type precision=bf16, or precision=fp16, which "
            "scales the loss.",
    },
    "dtype torch_dtype model_dtype param_dtype amp_dtype": {
        "float16": "precision=fp16", "fp16": "precision=fp16", "float32": "precision=fp32", "fp32": "precision=fp32",
        OTHER: "Type precision=bf16, which keeps weights in fp32, or precision=bf16_true for weights in bf16 too.",
    },
    "gradient_checkpointing activation_checkpointing use_gradient_checkpointing grad_checkpointing "
        "checkpoint_activations enable_activation_checkpointing": {"false": "remat=none", OTHER: "remat=full"},
    "recompute_activations": "remat=selective",
    "torch_compile use_compile jit_compile compile_model": {"false": "compile=none", OTHER: "compile=blocks"},
    "torch_compile_mode compile_mode": "compile=blocks compile.mode={}", "torch_compile_backend dynamo_backend": {
        "no": "compile=none", "false": "compile=none", OTHER: "compile=blocks"},
    "deterministic cudnn_deterministic full_determinism use_deterministic_algorithms": "CPU kernels are "
        "deterministic. On GPUs type backend=nccl backend.kernels=deterministic.",
    "benchmark cudnn_benchmark channels_last attention flash_attention flash_attn use_flash_attn "
        "attn_implementation": KERNELS,
    "detect_anomaly terminate_on_nan": "on_spike=stop",
    "sync_batchnorm sync_bn sync_batch_norm": "Each rank normalises its own part of a batch, and the statistics that "
        "are kept are averaged over the ranks. Leave it out; GroupNorm and LayerNorm do not depend on how a batch is "
        "split.",
    # data
    "num_workers dataloader_num_workers workers": "Type data.workers={} with data=images, dataset or webdataset; a "
        "thread of each rank loads other data.",
    "pin_memory dataloader_pin_memory prefetch_factor dataloader_prefetch_factor persistent_workers drop_last "
        "dataloader_drop_last use_distributed_sampler replace_sampler_ddp reload_dataloaders_every_n_epochs num_proc "
        "preprocessing_num_workers remove_unused_columns": LOADING,
    "shuffle shuffle_buffer_size shuffle_dataset": "Samples are shuffled with the seed. Leave it out.",
    "group_by_length": "Type data.bucket=50 with padded rows: data=chat, jsonl, parquet or hf.",
    "packing sample_packing packed": {
        "false": "data.packing=none", OTHER: "Type data.packing=pack with data=text, chat, jsonl, parquet or hf."},
    # model
    "pretrained pretrained_weights use_pretrained weights": "Type init=<weights>, or model=hf model.name=<name>, "
        "which begins from its weights.",
    "model_name model_name_or_path pretrained_model_name_or_path base_model model_path model_id": "model=hf "
        "model.name={}",
    "num_labels num_classes n_classes": "The data says how many classes there are. With model=hf type "
        "model.config={num_labels:{}} model.head=new.",
    "use_peft peft lora use_lora": ADAPTER, "lora_r lora_rank lora.r lora.rank peft.r peft.rank": "adapter=lora "
        "adapter.rank={}",
    "lora_alpha": "adapter=lora adapter.alpha={}", "lora_target_modules target_modules": "adapter=lora "
        "adapter.targets={}",
    "load_in_4bit qlora quantization quantize": IN_BITS, "load_in_8bit": IN_BITS,
    "freeze freeze_backbone frozen": "Type model.freeze=[<patterns of names>] with a model.",
    "arch architecture network net": OWN_MODEL,
    # processes
    "trainer": {
        "ddp": "strategy=ddp", "fsdp": "strategy=fsdp", "ddp_sim": "strategy=ddp devices=2", "cpu": "backend=gloo",
        "gpu": "A GPU is used where there is one. Leave it out.", "mps": "dtrain runs on GPUs of CUDA and ROCm, and "
            "on CPUs. Leave it out.",
        OTHER: "There is no trainer; its arguments are words. Type strategy=<word> devices=<processes per node>.",
    },
    "accelerator device use_gpu cuda gpu device_type": {"cpu": "backend=gloo", "false": "backend=gloo", OTHER: GPU_TOO},
    "use_cpu no_cuda cpu": {"false": GPU_TOO, OTHER: "backend=gloo"},
    "dropout": "dtrain's own models have no dropout. Leave it out; with model=hf type model.config={<its name>:{}}.",
    "train_size train_split": "Type data.holdout=<1 - {}>.",
    "tpu tpu_cores num_tpu": "dtrain does not run on TPUs. Leave it out.",
    "gpu_ids cuda_visible_devices visible_devices gpu_id": "The environment selects the GPUs. Type "
        "CUDA_VISIBLE_DEVICES={} dtrain <words>.",
    "deepspeed deepspeed_config ds_config deepspeed_config_file use_deepspeed deepscale_config": OF_DEEPSPEED,
    "zero_stage stage_of_zero zero zero_optimization.stage deepspeed_stage": {
        "0": "strategy=ddp", "1": "strategy=zero1", "2": "strategy=zero2", "3": "strategy=zero3", OTHER: f"{STAGES} "
            f"Type one of them."},
    "offload cpu_offload offload_optimizer offload_param offload_optimizer_device offload_param_device "
        "offload_optimizer.device offload_param.device "
        "fsdp_offload_params fsdp_cpu_offload move_params_to_cpu offload_params": OFFLOADED,
    "fsdp use_fsdp sharding_strategy fsdp_sharding_strategy fully_shard sharded_ddp fairscale": {
        "false": "strategy=ddp", "shard_grad_op": "strategy=fsdp strategy.reshard=never", "no_shard": "strategy=ddp",
        "hybrid_shard": "strategy=hsdp", "simple": "strategy=zero2", "zero_dp_2": "strategy=zero2",
        OTHER: "strategy=fsdp"},
    "reshard_after_forward fsdp_reshard_after_forward": {
        "false": "strategy=fsdp strategy.reshard=never", OTHER: "strategy=fsdp strategy.reshard=forward"},
    "ddp multi_gpu distributed data_parallel use_ddp distributed_data_parallel": {"false": "strategy=single",
    OTHER: "strategy=ddp"},
    "distributed_backend dist_backend ddp_backend process_group_backend": {
        "nccl": "backend=nccl", "gloo": "backend=gloo", "mpi": "backend=mpi", "ddp": "strategy=ddp",
        "fully_sharded": "strategy=fsdp",
        OTHER: "Type backend=nccl or backend=gloo."},
    "use_distributed_optimizer": "strategy=zero1",
    "sequence_parallel": "Type tensor.sequence=split with mesh.tp=2.",
    "find_unused_parameters ddp_find_unused_parameters gradient_as_bucket_view static_graph broadcast_buffers": "A "
        "rank whose samples reach a part of the model takes part with zeros. Leave it out.",
    "bucket_cap_mb ddp_bucket_cap_mb": "strategy=ddp strategy.bucket_mb={}",
    "local_rank node_rank machine_rank world_rank global_rank standalone rdzv_backend rdzv_id rdzv_conf same_network "
        "monitor_interval": RANKS,
    "world_size ntasks nprocs": "Type nodes=<nodes> devices=<processes per node>, whose product is {}.",
    "master_addr master_port main_process_ip main_process_port rdzv_endpoint dist_url init_method "
        "master_address": ADDRESS,
    "hostfile hosts nodelist": HOSTS,
    "do_train": "dtrain trains. Leave it out.",
    "do_eval do_predict": "Held-out data is evaluated every evaluate.every steps. Leave it out, or type dtrain "
        "evaluate out=<run>.",
    "push_to_hub hub_model_id hub_token": EXPORTED,
    # Hydra
    "experiment exp preset": RECIPE,
    "hparams_search hydra.sweeper sweeper": "Type dtrain -m optim.lr=1e-4,1e-3 sweep.search=random sweep.trials=10, "
        "or recipe=<file with sweep.space>.",
    "hydra.launcher": "Type launcher=<word>; dtrain launcher --help lists them.",
    "hydra.mode": "Type dtrain -m <words> for a sweep.",
    "hydra.output_subdir hydra.job.chdir hydra.verbose hydra.job_logging hydra.hydra_logging hydra.job.name "
        "hydra.sweep.subdir":
        "dtrain stays in the folder that it was started in, and writes below out. Type out=<URL>.",
    "trust_remote_code": OWN_CODE, "config_dir config_path": "hydra.searchpath=[{}]",
}
"""Names in other tools -> what is typed here, of all values or by value in lower case."""
BY_WORD: Mapping[str, Mapping[str, str]] = {
    "launcher=slurm": {
        "image container container_image": "launcher.more=['--container-image={}']",
        "mounts volumes container_mounts": "launcher.more=['--container-mounts={}']",
        "container_workdir workdir folder": "launcher.more=['--container-workdir={}']",
        "mem memory": "launcher.more=[--mem={}]", "gres": "launcher.more=[--gres={}]",
        **{name: f"launcher.more=['--{name.replace('_', '-')}={{}}']"
           for name in ("constraint", "nodelist", "exclude", "reservation", "dependency", "licenses", "comment",
                        "mail_type", "mail_user", "begin", "priority", "nice", "switches", "tmp")},
        "exclusive": "launcher.more=[--exclusive]", "requeue": "The job is queued again until it has finished. Leave "
            "it out.",
        "queue": "launcher.partition={}", "cpus_per_task cpus_per_gpu": "Type threads=<cores of a rank>.",
        "time_min timeout_min": "launcher.time={}",
        "env environment": "The job has the environment of the command. Type "
            "launcher.setup=['export <name>=<value>'] for more.",
    },
    "launcher=kubernetes": {
        "partition": "launcher.queue={}", "container container_image": "launcher.image={}",
        "setup": "Put it into the image.",
        "node_selector nodeselector": "Type launcher.patch={spec: {nodeSelector: {<name>: <value>}}}.",
        "secrets": "Type launcher.env_from=[<secret>/<key>:<variable>].", "mounts": "launcher.volumes=[{}]",
    },
}
"""The word chosen for a group -> names of its arguments elsewhere -> what is typed here."""
SWITCHES = (
    "auto_lr_find lr_find lr_finder swa stochastic_weight_avg stochastic_weight_averaging use_ema model_ema "
    "load_best_model_at_end save_best save_best_only early_stopping early_stop use_early_stopping detect_anomaly "
    "terminate_on_nan use_distributed_optimizer sequence_parallel recompute_activations use_peft peft lora use_lora "
    "load_in_4bit load_in_8bit qlora quantize push_to_hub group_by_length fp8 auto_find_batch_size fast_dev_run "
    "dry_run dryrun smoke_test debug debug_mode profile use_profiler"
)
"""Names that say nothing where they are false."""
SAID: Mapping[str, str | Mapping[str, str]] = {
    name: {"false": OFF, OTHER: text} if name in SWITCHES.split() and isinstance(text, str) else text
    for names, text in SAYINGS.items()
    for name in names.split()
}

FLAGS: Mapping[str, str] = {
    "c": "recipe={}", "cn": "recipe={}", "cp": "hydra.searchpath=[{}]", "cd": "hydra.searchpath=[{}]",
    "b": "batch={}", "o": "out={}", "n": "devices={}", "np": "devices={}", "N": "nodes={}",
    "v": "Type log.every=1 for every step on the console.", "q": "logger=[tensorboard]",
    **dict.fromkeys(("cfg", "resolve", "package", "info", "p", "hydra-help", "run", "print-config"), SHOWN),
    **dict.fromkeys(("m", "module"), "dtrain is started alone. Type dtrain <words>."),
    "shell-completion": "Type dtrain completion bash, zsh or fish.", "version": "Type dtrain --version alone.",
    "help": "Type dtrain --help.", "multirun": "Type -m for a sweep: dtrain -m optim.lr=1e-4,1e-3.",
    "config-dir": "hydra.searchpath=[{}]", "config-path": "hydra.searchpath=[{}]",
}
"""Options of other commands, without their dashes."""
# fmt: on
