"""The loop of tests/bench/sweeps.py without dtrain: 20 steps of the same MLP, nothing saved, started as other tools do.

OMP_NUM_THREADS=1 python tests/bench/loops.py forked|joblib|optuna|ray <jobs>
"""

import itertools
import os
import sys

SLOTS = os.cpu_count() or 1


def job(seed: int) -> float:
    """The loss of the last step."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    sizes = (64, 128, 128, 128)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.GELU())]
    net = nn.Sequential(*layers, nn.Linear(128, 10))
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(20):
        x, y = torch.randn(8, 64), torch.randn(8, 10)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
    return loss.item()


def forked(jobs: int) -> None:
    """A process for each, forked from one that holds torch, one more at a time than there are cores."""
    import torch._dynamo

    torch.set_num_threads(1)
    running = 0
    for seed in range(jobs):
        if not os.fork():
            job(seed)
            os._exit(0)
        running += 1
        if running > SLOTS:
            os.wait()
            running -= 1
    for _ in range(running):
        os.wait()


def joblib(jobs: int) -> None:
    """Its worker processes run job after job."""
    from joblib import Parallel, delayed

    Parallel(n_jobs=SLOTS)(delayed(job)(seed) for seed in range(jobs))


def optuna(jobs: int) -> None:
    """Its own loop: one process, one trial after another."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(lambda trial: job(trial.suggest_int("seed", 0, jobs)), n_trials=jobs)


def ray(jobs: int) -> None:
    """Ray Tune: an actor for each trial, as many at a time as there are cores."""
    import tempfile

    import ray
    from ray import tune

    def trainable(config: dict[str, int]) -> dict[str, float]:
        return {"loss": job(config["seed"])}

    ray.init(num_cpus=SLOTS, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    space = {"seed": tune.grid_search(list(range(jobs)))}
    settings = tune.RunConfig(storage_path=tempfile.mkdtemp(), verbose=0)
    tune.Tuner(tune.with_resources(trainable, {"cpu": 1}), param_space=space, run_config=settings).fit()
    ray.shutdown()


if __name__ == "__main__":
    {"forked": forked, "joblib": joblib, "optuna": optuna, "ray": ray}[sys.argv[1]](int(sys.argv[2]))
