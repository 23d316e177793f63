"""Values of Ray Train's configs, against its documentation."""

from pathlib import Path

from imported import example, imported


def test_a_script(tmp_path: Path) -> None:
    read = example("ray_script.py")
    words = {
        "devices": 4,
        "launcher": "local",
        "launcher.restarts": 3,
        "checkpoint.keep": 2,
        "checkpoint.every": 100,
    }
    assert read.words == words | {"precision": "fp32"}
    assert read.asked == {"optim.lr", "batch"}, "what a loop of one's own takes is asked for, not left out"
    assert read.command["out"] == "s3://bucket/experiments/mnist"
    assert "hook" in read.told("refused")["run_config.callbacks.0.class_path"]
    assert read.plan(tmp_path).launcher["restarts"] == 3


def test_what_goes_to_a_function_of_ones_own_is_told(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "TorchTrainer(work, train_loop_config={'lr': 0.1, 'batch_size': 64}, scaling_config=ScalingConfig(num_workers=4))\n"
    )
    read = imported(path)
    assert set(read.told("refused")) == {"train_loop_config.lr", "train_loop_config.batch_size"}
    assert read.words["devices"] == 4 and read.asked == {"optim.lr", "microbatch"}


def test_yaml(tmp_path: Path) -> None:
    read = example("ray_configs.yaml")
    assert read.words == {
        "devices": 2,
        "backend": "gloo",
        "checkpoint.best": "eval_loss",
        "checkpoint.keep": 1,
        "precision": "fp32",
    }
    assert read.command["out"] == "outputs/small"
    refused = read.told("refused")
    assert "launcher.restarts=100" in refused["failure_config.max_failures"]
    assert "steps=" in refused["run_config.stop.training_iteration"]
    assert "scaling_config.accelerator_type" in refused


def test_elastic_workers_are_elastic_nodes(tmp_path: Path) -> None:
    read = example("ray_elastic.json")
    assert read.words == {
        "nodes": "2:8",
        "devices": 1,
        "launcher": "local",
        "launcher.restarts": 5,
        "precision": "fp32",
    }
    assert [other.nodes for other in read.plan(tmp_path).others] == [7, 6, 5, 4, 3, 2]


def test_the_best_checkpoint_by_its_highest_figure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(
        "RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=3, checkpoint_score_attribute='accuracy'))\n"
    )
    read = imported(path)
    assert set(read.told("refused")) == {
        "run_config.checkpoint_config.num_to_keep",
        "run_config.checkpoint_config.checkpoint_score_attribute",
    }
    assert read.words == {"checkpoint.keep": None, "precision": "fp32"}


def test_what_a_loop_of_ones_own_takes_is_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(
        "config = dict(epochs=10, batch_size=64, depth=3)\nTorchTrainer(loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2))\n"
    )
    read = imported(path)
    assert read.asked == {"epochs", "microbatch"} and read.words["devices"] == 2
    assert "train_loop_config.depth" in read.told("refused") and "train_loop_per_worker" in read.told("unneeded")
