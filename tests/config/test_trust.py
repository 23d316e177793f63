"""Names of code: ours in their groups, torch's classes, the user's packages, and nothing else."""

import pytest

from dtrain.config.schema import GROUPS
from dtrain.config.trust import allowed, from_elsewhere, own, refusal


def test_our_own_words_are_read_off_conf() -> None:
    assert "dtrain.optim.adamw.build" in own()["optim"]
    assert {group for group in GROUPS if not own().get(group)} == set()


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("dtrain.model.gpt.GPT", "model"), ("dtrain.data.digits.Digits", "data"), ("dtrain.train.train", "loop"), ("torch.nn.Linear", "model"),
        ("torch.optim.SGD", "optim"), ("torch.optim.lr_scheduler.StepLR", "schedule"),
    ],
)  # fmt: skip
def test_ours_and_torchs_may_run(name: str, group: str) -> None:
    assert allowed(name, group, [])


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("os.system", "model"), ("torch.load", "model"), ("torch.hub.load", "model"), ("torch.save", "model"), ("torch.nn.modules.os.system", "model"),
        ("torch.nn.utils.clip_grad_norm_", "model"), ("torch.nn.functional.relu", "model"), ("torch.nn.modules.linear.Linear", "model"), ("torch.optim.os.system", "optim"),
        ("torch.nn.Linear.__init__", "model"), ("torch.nn.Linear.forward", "model"), ("dtrain.storage.store.remove", "model"), ("dtrain.data.text.Path", "data"),
        ("dtrain.launcher.process.fork", "launcher"), ("dtrain.logger.tensorboard.TensorBoard", "model"), ("dtrain.testing.faults.AtStep", "model"),
        ("dtrain.checkpoint.sharded.Sharded", "hook"), ("Linear", "model"), ("", "model"), ("torch.nn.Linear ", "model"), ("torch.nn.L\u0456near", "model"), ("['os.system']", "model"),
        ("builtins.eval", "model"), ("torch..nn.Linear", "model"), ("torch.nn.Linear\n", "model"),
    ],
)  # fmt: skip
def test_nothing_else_does(name: str, group: str) -> None:
    assert not allowed(name, group, [])
    assert name.strip()[:4] in refusal(f"{group}._target_", name)


def test_trust_is_of_packages_and_what_is_below_them() -> None:
    assert allowed("mine.nets.Net", "model", ["mine"])
    assert allowed("mine.nets.Net", "model", ["mine.nets"])
    assert not allowed("mine.other.Net", "model", ["mine.nets"])
    assert not allowed("mineral.Net", "model", ["mine"])
    assert not allowed("mine.Net.__init__.__globals__", "model", ["mine"])


def test_the_refusal_says_what_to_type() -> None:
    assert "type model._target_=torch.nn.Linear" in refusal("model._target_", "torch.nn.modules.linear.Linear")
    assert "Type trust=[mine] if you know what it does." in refusal("model._target_", "mine.Net")
    assert "dtrain.optim.sgd.build" in refusal("optim._target_", "dtrain.optim.sgdd.build")


def test_from_elsewhere_code_stays_where_a_model_learns() -> None:
    assert from_elsewhere("mine.Net", "model")
    assert from_elsewhere("dtrain.hook.sample.Sample", "hook")
    assert not from_elsewhere("mine.Hook", "hook")
    assert not from_elsewhere("mine.Launcher", "launcher")
    assert not from_elsewhere("dtrain.testing.faults.AtStep", "hook")
