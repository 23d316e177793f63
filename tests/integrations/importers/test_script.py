"""Scripts with a loop of their own: what their calls say is carried, and model, data and loss are asked for."""

from pathlib import Path

import pytest
from imported import Imported, imported

from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.integrations.importers.write import command

ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader
from mine import Faces, Net
raise SystemExit("it ran")
num_epochs = 3
set_seed(42)
accelerator = Accelerator({arguments})
model = Net(64).to(accelerator.device)
train_dataloader = DataLoader(Faces(), shuffle=True, batch_size=8, num_workers=2)
eval_dataloader = DataLoader(Faces(), batch_size=32)
optimizer = AdamW(model.parameters(), lr=2e-5)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
for epoch in range(num_epochs):
    for x, y in train_dataloader:
        accelerator.backward(F.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""
ADAMW = {"optim": "adamw", "optim.lr": 2e-5, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8, "optim.weight_decay": 0.01}
CONSTANT = {"schedule": "constant", "schedule.warmup": 0}
HOLDOUT = {"data.holdout"}
CODE = {"model", "data", "objective"}


def script(folder: Path, text: str) -> Imported:
    path = folder / "train.py"
    path.write_text(text)
    return imported(path)


def test_a_script_of_accelerate(tmp_path: Path) -> None:
    arguments = "mixed_precision='bf16', gradient_accumulation_steps=2, log_with='tensorboard', project_dir='logs'"
    read = script(tmp_path, ACCELERATE.replace("{arguments}", arguments))
    assert (read.name, read.open - HOLDOUT) == ("script", CODE)
    assert read.words == {
        **ADAMW, **CONSTANT, "microbatch": 8, "accumulate": 2, "precision": "bf16", "clip": 1.0, "seed": 42,
        "epochs": 3, "logger": ["console", "tensorboard"],
    }  # fmt: skip
    typed = command(read.ledger, "mine.yaml")
    for word in (
        "model._target_=mine.Net trust=[mine]",
        "data.dataset._target_=mine.Faces",
        "objective=<classification",
    ):
        assert word in typed, word
    (tmp_path / "mine.yaml").write_text(read.recipe)
    with pytest.raises(WordsError) as raised:
        compose([f"recipe={tmp_path}/mine.yaml"])
    for word in CODE:
        assert f"leaves {word} to you. Type {word}=<" in str(raised.value), word


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("split_batches=True", {"batch": 8}),
        ("cpu=True, mixed_precision='no'", {"backend": "gloo", "precision": "fp32"}),
        ("gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4)", {"accumulate": 4}),
        (
            "deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, offload_param_device='cpu')",
            {"strategy": "zero3", "strategy.offload": "cpu"},
        ),
        (
            "fsdp_plugin=FullyShardedDataParallelPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)",
            {"strategy": "fsdp", "strategy.reshard": "never"},
        ),
        ("fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)", {"strategy": "fsdp"}),
    ],
)
def test_arguments_of_the_accelerator(arguments: str, words: dict[str, object], tmp_path: Path) -> None:
    read = script(tmp_path, ACCELERATE.replace("{arguments}", arguments))
    assert {name: read.words.get(name) for name in words} == words
    assert read.open - HOLDOUT == CODE


PLAIN = """
import argparse
import torch
from torch import nn, optim
class Net(nn.Module): ...
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--wd", dest="weight_decay", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train_loader = torch.utils.data.DataLoader(load(), batch_size=args.batch_size, shuffle=True)
    model = Net().to(args.device)
    optimizer = optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay)
    {schedule}
    for epoch in range(1, args.epochs + 1):
        for x, y in train_loader:
            nn.functional.nll_loss(model(x), y).backward()
if __name__ == "__main__":
    main()
"""


def test_a_plain_script_with_the_defaults_of_argparse(tmp_path: Path) -> None:
    read = script(tmp_path, PLAIN.replace("{schedule}", ""))
    assert read.words == {
        "optim": "sgd", "optim.lr": 0.1, "optim.momentum": 0.9, "optim.weight_decay": 1e-4, "optim.nesterov": False,
        **CONSTANT, "batch": 64, "epochs": 14, "seed": 1, "clip": None, "precision": "fp32",
    }  # fmt: skip
    assert "model._target_=train.Net trust=[train]" in read.told("refused")["loop.model"]
    assert "classification for nll_loss" in read.command["objective"]
    assert "once the class is in a file" in script(tmp_path, PLAIN.replace("if __name", "if name")).command["model"]


@pytest.mark.parametrize(
    ("schedule", "words", "asked"),
    [
        ("sched = get_scheduler('cosine', optimizer, num_warmup_steps=5)", {"schedule": "cosine", "schedule.warmup": 5}, set()),
        ("sched = get_constant_schedule_with_warmup(optimizer, 7)", {"schedule": "constant", "schedule.warmup": 7}, set()),
        (
            "sched = get_linear_schedule_with_warmup(optimizer, 10, 100)",
            {"schedule": "linear", "schedule.warmup": 10},
            set(),
        ),
        ("sched = get_linear_schedule_with_warmup(optimizer, 10, len(train_loader))", {"schedule": "linear"}, set()),
        ("sched = StepLR(optimizer, step_size=1)", {}, {"schedule", "schedule.warmup"}),
        ("args.lr = 3", {}, {"optim.lr"}),
        ("model = nn.parallel.DistributedDataParallel(model)", {"strategy": "ddp", "microbatch": 64}, set()),
        ("with torch.autocast('cuda', dtype=torch.bfloat16): pass", {"precision": "bf16"}, set()),
        ("scaler = torch.amp.GradScaler()", {"precision": "fp16"}, set()),
        ("nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)", {"clip": 0.5}, set()),
        ("nn.utils.clip_grad_value_(model.parameters(), 0.5)", {}, {"clip"}),
        ("loss = loss / accum_steps", {}, {"accumulate"}),
    ],
)  # fmt: skip
def test_what_else_a_script_calls(schedule: str, words: dict[str, object], asked: set[str], tmp_path: Path) -> None:
    read = script(tmp_path, PLAIN.replace("{schedule}", schedule))
    assert {name: read.words.get(name) for name in words} == words
    assert read.open - HOLDOUT == CODE | asked


def test_groups_with_and_without_decay_and_a_mapping_of_values(tmp_path: Path) -> None:
    text = PLAIN.replace(
        "model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay",
        "[{'params': rest, 'weight_decay': config['wd']}, {'params': norms, 'weight_decay': 0.0}], lr=float(config['lr'])",
    ).replace("{schedule}", "config = {'lr': 2e-5, 'wd': 0.1, 'epochs': 3}\n    config['epochs'] = 1")
    read = script(tmp_path, text)
    assert (read.words["optim.lr"], read.words["optim.weight_decay"]) == (2e-5, 0.1)


def test_fabric_and_a_trainer_of_the_script(tmp_path: Path) -> None:
    text = PLAIN.replace("{schedule}", "fabric = Fabric(devices=2, precision='bf16-mixed', strategy='fsdp')")
    words = {"devices": 2, "precision": "bf16", "strategy": "fsdp", "microbatch": 64}
    assert {name: script(tmp_path, text).words.get(name) for name in words} == words
    own = PLAIN.replace("{schedule}", "Trainer(max_epochs=3)").replace("class Net", "class Trainer: ...\nclass Net")
    assert script(tmp_path, own).name == "script", "a class of the file's own is not Lightning's"


def test_a_model_of_the_hub_is_carried(tmp_path: Path) -> None:
    made = "AutoModelForSequenceClassification.from_pretrained('bert-base-cased', num_labels=2)"
    read = script(tmp_path, PLAIN.replace("Net()", made).replace("{schedule}", ""))
    assert [read.words[f"model{end}"] for end in ("", ".name", ".task")] == ["hf", "bert-base-cased", "classification"]
    assert read.open - HOLDOUT == {"data", "objective"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("for x, y in eval_dataloader: model(x)", "eval_dataloader"),
        ("for step, batch in enumerate(tqdm(val_loader)): model(batch)", "enumerate(tqdm(val_loader))"),
        ("held = DataLoader(Faces(train=False), 64)", "Faces(train=False)"),
        ("", None),
    ],
)
def test_an_evaluation_is_told_with_what_to_type(line: str, told: str | None, tmp_path: Path) -> None:
    read = script(tmp_path, PLAIN.replace("{schedule}", line))
    assert read.ledger.leaves.get("loop.evaluation") == told
    if told:
        why = read.told("refused")["loop.evaluation"]
        assert all(word in why for word in ("evaluate.every=epoch", "evaluate.sets=", "data.holdout="))


@pytest.mark.parametrize(
    ("size", "call"),
    [("batch_size=32", "train()"), ("batch_size=8", "train(32)"), ("batch_size", "train(batch_size=args.size)")],
)
def test_the_batch_of_a_function_is_what_its_call_gives(size: str, call: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"""
def train({size}):
    loader = DataLoader(rows, batch_size=batch_size, shuffle=True)
    held = DataLoader(rows, batch_size=512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
parser.add_argument("--size", default=32)
args = parser.parse_args()
{call}
"""
    )
    assert imported(path).words["batch"] == 32
