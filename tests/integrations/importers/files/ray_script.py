import ray.train
from mine import MyCallback
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

failures = FailureConfig(max_failures=3)


def loop(config):
    ray.train.report({"loss": 0.0})


trainer = TorchTrainer(
    loop,
    train_loop_config={"lr": 1e-3},
    scaling_config=ScalingConfig(
        num_workers=4, use_gpu=True, resources_per_worker={"GPU": 1, "CPU": 8}, placement_strategy="SPREAD"
    ),
    run_config=RunConfig(
        name="mnist",
        storage_path="s3://bucket/experiments",
        failure_config=failures,
        checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_frequency=100),
        callbacks=[MyCallback()],
    ),
)
