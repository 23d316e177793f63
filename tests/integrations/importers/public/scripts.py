"""Public scripts and YAML of Lightning and Ray Train: what they call, what a person has to type, and what the training is, by hand."""

from integrations.importers.public.row import Row

PL = "Lightning-AI/pytorch-lightning examples/pytorch/"
BEST = {
    "class_path": "pytorch_lightning.callbacks.ModelCheckpoint",
    "init_args": {"monitor": "val_loss", "save_top_k": 3, "save_last": True},
}
BOARD = {"class_path": "pytorch_lightning.loggers.TensorBoardLogger", "init_args": {"save_dir": "logs/"}}


def vocos(batch: int, head: str) -> dict[str, object]:
    params = {"filelist_path": "???", "sampling_rate": 24000, "batch_size": batch}
    return {
        "seed_everything": 4444, "data": {"class_path": "vocos.dataset.VocosDataModule", "init_args": {"train_params": params, "val_params": params}},
        "model": {"class_path": "vocos.experiment.VocosExp", "init_args": {"initial_learning_rate": 2e-4, "head": {"class_path": f"vocos.heads.{head}"}}},
        "trainer": {
            "logger": BOARD, "callbacks": [{"class_path": "pytorch_lightning.callbacks.LearningRateMonitor"}, BEST, {"class_path": "vocos.helpers.GradNormCallback"}],
            "max_steps": 2000000, "limit_val_batches": 100, "accelerator": "gpu", "strategy": "ddp", "devices": [0], "log_every_n_steps": 100,
        },
    }  # fmt: skip


def climax(**trainer: object) -> dict[str, object]:
    return {
        "seed_everything": 42,
        "trainer": {
            "default_root_dir": "${oc.env:OUTPUT_DIR,/exps}", "precision": 16, "gpus": None, "num_nodes": 1, "accelerator": "gpu", "strategy": "ddp", "min_epochs": 1,
            "max_epochs": 100, "sync_batchnorm": True, "resume_from_checkpoint": None, "fast_dev_run": False, **trainer,
        },
        "model": {"lr": 5e-4, "beta_1": 0.9, "weight_decay": 1e-5, "net": {"class_path": "climax.arch.ClimaX"}}, "data": {"root_dir": "/data", "batch_size": 128},
    }  # fmt: skip


OURS = {
    "model": "gpt", "objective": "next_token", "optim": "sgd", "schedule": "constant", "data": "text", "batch": 16,
}  # fmt: skip
VOCOS = {
    "strategy": "ddp",
    "devices": 1,
    "steps": 2000000,
    "seed": 4444,
    "precision": "fp32",
    "clip": None,
    "log.every": 100,
}
LIGHTNING = [
    Row("charactr-platform/vocos configs/vocos.yaml", vocos(16, "ISTFTHead"), OURS, VOCOS, ["model.class_path", "trainer.limit_val_batches"]),
    Row("charactr-platform/vocos configs/vocos-imdct.yaml", vocos(16, "IMDCTCosHead"), OURS, VOCOS, ["model.class_path"]),
    Row("microsoft/ClimaX configs/global_forecast_climax.yaml", climax(callbacks=[{"class_path": "pytorch_lightning.callbacks.EarlyStopping",
        "init_args": {"monitor": "val/w_rmse", "mode": "min", "patience": 5}}]),
        OURS, {"strategy": "ddp", "nodes": 1, "precision": "fp16", "seed": 42, "clip": None, "epochs": 100},
        ["trainer.sync_batchnorm", "trainer.min_epochs"]),
    Row("microsoft/ClimaX configs/pretrain_climax.yaml", climax(limit_val_batches=0, num_sanity_val_steps=0),
        OURS, {"strategy": "ddp", "nodes": 1, "precision": "fp16", "seed": 42, "clip": None, "epochs": 100}, ["trainer.sync_batchnorm"]),
    Row(f"{PL}basics/autoencoder.py",
        "from lightning.pytorch.cli import LightningCLI\ncli = LightningCLI(Net, Data, seed_everything_default=1234, run=False,"
        " trainer_defaults={'callbacks': Sampler(), 'max_epochs': 10}, save_config_kwargs={'overwrite': True})\ncli.trainer.fit(cli.model, datamodule=cli.datamodule)\n",
        OURS, {"seed": 1234, "epochs": 10, "precision": "fp32", "clip": None}, ["trainer.callbacks.class_path"]),
    Row(f"{PL}basics/profiler_example.py",
        "from lightning.pytorch.cli import LightningCLI\ncli = LightningCLI(Net, Data, run=False, trainer_defaults={'profiler': Profiler(), 'max_epochs': 1,"
        " 'limit_train_batches': 15, 'limit_val_batches': 15, 'accelerator': 'gpu'})\n",
        OURS, {"steps": 15, "precision": "fp32", "clip": None}, ["trainer.profiler.class_path"]),
    Row(f"{PL}basics/transformer.py",
        "import lightning as L\ntrainer = L.Trainer(gradient_clip_val=0.25, max_epochs=20)\ntrainer.fit(model, train)\ntrainer.test(model, test)\n",
        OURS, {"epochs": 20, "clip": 0.25, "precision": "fp32"}),
    Row(f"{PL}bug_report/bug_report_model.py",
        "import os\nfrom lightning.pytorch import Trainer\ntrainer = Trainer(default_root_dir=os.getcwd(), limit_train_batches=1, limit_val_batches=1, limit_test_batches=1,"
        " num_sanity_val_steps=0, max_epochs=1, enable_model_summary=False)\ntrainer.fit(model)\n",
        OURS, {"steps": 1, "clip": None, "precision": "fp32"}, ["trainer.limit_val_batches"]),
    Row(f"{PL}domain_templates/imagenet.py",
        "from lightning.pytorch.cli import LightningCLI\nLightningCLI(Net, trainer_defaults={'max_epochs': 90, 'accelerator': 'auto', 'devices': 1, 'logger': False,"
        " 'benchmark': True, 'callbacks': [TQDMProgressBar(refresh_rate=10), ModelCheckpoint(monitor='val_acc1', mode='max')]}, seed_everything_default=42)\n",
        OURS, {"devices": 1, "seed": 42, "epochs": 90, "precision": "fp32", "clip": None}, ["trainer.benchmark"]),
    Row(f"{PL}domain_templates/reinforce_learn_Qnet.py",
        "from lightning.pytorch import Trainer\ntrainer = Trainer(accelerator='cpu', devices=1, val_check_interval=100)\ntrainer.fit(model)\n",
        OURS, {"backend": "gloo", "devices": 1, "evaluate.every": 100, "clip": None, "precision": "fp32"}),
    Row(f"{PL}fp8_distributed_transformer/train.py",
        "import lightning as L\nfrom lightning.pytorch.strategies import ModelParallelStrategy\nmp_strategy = ModelParallelStrategy(data_parallel_size=4,"
        " tensor_parallel_size=1)\ntrainer = L.Trainer(strategy=mp_strategy, max_steps=100, precision='bf16-true', accumulate_grad_batches=8)\n",
        {**{word: OURS[word] for word in OURS if word != "batch"}, "microbatch": 2}, {"strategy": "fsdp", "mesh.dp_shard": 4, "batch": 64, "steps": 100, "precision": "bf16_true", "batch.accumulate": 8, "clip": None}),
    Row(f"{PL}tensor_parallel/train.py",
        "import lightning as L\nstrategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)\n"
        "trainer = L.Trainer(accelerator='cuda', devices=4, strategy=strategy, limit_train_batches=10, max_epochs=1)\ntrainer.fit(model)\n",
        OURS, {"strategy": "fsdp", "mesh.dp_shard": 2, "mesh.tp": 2, "devices": 4, "steps": 10, "batch": 16, "clip": None, "precision": "fp32"}),
]  # fmt: skip

RAY = [
    Row("ray-project/ray doc/source/train/doc_code/deepspeed_torch_trainer.py",
        "from ray.train import ScalingConfig\ntrainer = TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=4, use_gpu=True))\n",
        {"batch": 64}, {"devices": 4, "batch": 64}),
    Row("ray-project/ray doc/source/train/doc_code/fault_tolerance.py",
        "import ray.train, uuid\nretries = ray.train.FailureConfig(max_failures=2)\nretries = ray.train.FailureConfig(max_failures=-1)\n"
        "one = TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=4), run_config=ray.train.RunConfig(name=f'run-{uuid.uuid4().hex}',"
        " failure_config=ray.train.FailureConfig(max_failures=3)))\n"
        "two = TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2), run_config=ray.train.RunConfig(name=f'run-{uuid.uuid4().hex}',"
        " failure_config=ray.train.FailureConfig(max_failures=3)))\n",
        {"devices": 2}, {"devices": 2, "restarts": 3}, ["scaling_config.num_workers"]),
    Row("ray-project/ray doc/source/train/doc_code/getting_started_lightning.py",
        "import pytorch_lightning as pl\nfrom ray.train import ScalingConfig\ntrainer = pl.Trainer(max_epochs=10, devices='auto', accelerator='auto',"
        " strategy=ray.train.lightning.RayDDPStrategy(), plugins=[ray.train.lightning.RayLightningEnvironment()], callbacks=[RayTrainReportCallback()])\n"
        "scaling_config = ScalingConfig(num_workers=2, use_gpu=True)\ntrainer = TorchTrainer(train, scaling_config=scaling_config)\n",
        {**OURS, "batch": 8}, {"devices": 2, "batch": 8, "epochs": 10}),
    Row("ray-project/ray doc/source/train/doc_code/key_concepts.py",
        "import ray.train\ntrainer = DataParallelTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2))\n"
        "run_config = RunConfig(name='my_train_run', storage_path=os.path.expanduser('~/ray_results'))\n"
        "run_config = RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2))\n"
        "run_config = RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute='mean_accuracy', checkpoint_score_order='max'),"
        " storage_path='s3://remote-bucket/location')\n"
        "trainer = DataParallelTrainer(fail, scaling_config=ray.train.ScalingConfig(num_workers=1))\n",
        {"devices": 2}, {"devices": 2}, ["scaling_config.num_workers"]),
]  # fmt: skip
