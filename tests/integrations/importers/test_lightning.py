"""Arguments of Lightning's Trainer, in Python and YAML, against its documentation."""

from pathlib import Path
from typing import Any

import pytest
from imported import Imported, example, imported

from dtrain.compose import compose
from dtrain.errors import WordsError

PARTS = {"model", "data", "objective", "optim", "schedule", "batch"}
"""What the classes of a script hold, and import asks for."""


def script(folder: Path, arguments: str) -> Imported:
    path = folder / "train.py"
    path.write_text(
        f"from lightning import Trainer\nraise SystemExit('this file is read, not run')\ntrainer = Trainer({arguments})\n"
    )
    return imported(path)


def test_a_script() -> None:
    read = example("lightning_script.py")
    assert read.words == {
        "devices": 4, "nodes": 2, "strategy": "ddp", "precision": "bf16", "steps": 10_000, "accumulate": 2,
        "clip": 0.5, "evaluate.every": 500, "log.every": 50, "time_limit": "0-12:30:00", "checkpoint.best": "eval_val_loss",
        "checkpoint.best_is": "lowest", "checkpoint.every": 500, "logger": ["console", "tensorboard", "wandb"], "logger.wandb.project": "faces",
        "stop.metric": "eval_val_loss", "stop.best_is": "lowest", "stop.patience": 5,
    }  # fmt: skip
    refused = read.told("refused")
    assert refused["trainer.default_root_dir"] == "computed in Python, which dtrain does not run. Type out=<value>."
    assert "GroupNorm" in refused["trainer.sync_batchnorm"]
    assert read.told("carried")["trainer.callbacks.2.init_args.patience"] == "stop.patience=5"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("'val_loss'", {"metric": "eval_val_loss", "best_is": "lowest", "patience": 3}),
        (
            "monitor='val_loss', min_delta=0.01, mode='min'",
            {"metric": "eval_val_loss", "best_is": "lowest", "patience": 3, "least": 0.01},
        ),
        (
            "monitor='val_acc', mode='max', patience=2",
            {"metric": "eval_val_acc", "best_is": "highest", "patience": 2},
        ),
        ("monitor='train_loss'", {"metric": "???", "best_is": "lowest", "patience": 3}),
        ("monitor=args.watched, mode=args.mode", {"metric": "???", "best_is": "???", "patience": 3}),
    ],
)
def test_early_stopping(arguments: str, words: dict[str, Any], tmp_path: Path) -> None:
    read = script(tmp_path, f"max_steps=9, callbacks=[EarlyStopping({arguments})]")
    known = {word.removeprefix("stop."): value for word, value in read.ledger.words.items() if word.startswith("stop.")}
    assert known == words
    assert {word for word in read.asked if word.startswith("stop.")} == {
        f"stop.{word}" for word, value in words.items() if value == "???"
    }


def test_the_best_checkpoint_is_by_what_the_script_watches(tmp_path: Path) -> None:
    read = script(tmp_path, "max_steps=9, callbacks=[ModelCheckpoint(monitor='val_acc', mode='max')]")
    known = {word: value for word, value in read.words.items() if word.startswith("checkpoint.best")}
    assert known == {"checkpoint.best": "eval_val_acc", "checkpoint.best_is": "highest"}
    assert "checkpoint.best" in script(tmp_path, "callbacks=ModelCheckpoint(monitor='train_loss')").asked


def test_callbacks_that_code_gathers_are_not_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "parts = []\nparts.append(EarlyStopping('val_acc', mode='max'))\ntrainer = Trainer(max_steps=10, callbacks=parts)\n"
    )
    read = imported(path)
    assert (read.words["stop.metric"], read.words["stop.best_is"]) == ("eval_val_acc", "highest")


def test_the_time_limit_is_what_was_meant(tmp_path: Path) -> None:
    assert example("lightning_script.py").plan(tmp_path).time_limit == 12.5 * 3600


def test_an_object_of_a_strategy() -> None:
    read = example("lightning_fsdp.py")
    words = {
        "strategy": "fsdp",
        "strategy.reshard": "never",
        "strategy.offload": "cpu",
        "remat": "full",
        "precision": "fp16",
        "time_limit": 12600,
        "clip": None,
        "epochs": 3,
        "checkpoint.every": "epoch",
    }
    assert read.words == words
    assert "Did you mean trainer.accelerator?" in read.told("refused")["trainer.acelerator"]


def test_the_yaml_of_the_cli() -> None:
    read = example("lightning_cli.yaml")
    assert read.words == {
        "seed": 42, "devices": 2, "nodes": 1, "strategy": "zero2", "strategy.offload": "cpu", "precision": "bf16_true", "steps": 2000, "accumulate": 1,
        "checkpoint.keep": None, "checkpoint.every": 200, "logger": ["console"], "optim": "adamw", "optim.lr": 1e-3, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8,
        "optim.weight_decay": 0.0, "clip": None,
    }  # fmt: skip
    assert "torch.nn.Module" in read.told("refused")["model.init_args.width"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("strategy='deepspeed_stage_3_offload'", {"strategy": "zero3", "strategy.offload": "cpu"}),
        ("strategy='fsdp'", {"strategy": "fsdp", "strategy.reshard": "forward"}),
        ("strategy='auto', devices='auto'", {}),
        ("precision='16-mixed'", {"precision": "fp16"}),
        ("precision='32-true'", {"precision": "fp32"}),
        ("accelerator='cpu', devices='3'", {"backend": "gloo", "devices": 3}),
        ("gradient_clip_val=0", {"clip": None}),
    ],
)
def test_arguments(argument: str, words: dict[str, object], tmp_path: Path) -> None:
    assert script(tmp_path, f"max_steps=-1, {argument}").words == {"clip": None, "precision": "fp32"} | words


@pytest.mark.parametrize(
    "argument",
    [
        "precision='64-true'",
        "strategy='dp'",
        "accelerator='tpu'",
        "overfit_batches=10",
        "gradient_clip_algorithm='value'",
    ],
)
def test_what_is_not_here(argument: str, tmp_path: Path) -> None:
    read = script(tmp_path, f"max_steps=5, {argument}")
    assert list(read.told("refused")) == [f"trainer.{argument.split('=')[0]}"]
    assert read.words == {"steps": 5, "clip": None} | (
        {} if "precision" in read.asked - PARTS else {"precision": "fp32"}
    )


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("max_epochs=2, limit_train_batches=1", {"steps": 2}),
        (
            "max_epochs=2, limit_train_batches=5, accumulate_grad_batches=2",
            {"steps": 6, "accumulate": 2},
        ),
        ("max_steps=9, limit_train_batches=1.0", {"steps": 9}),
        ("limit_train_batches=1", {}),
        ("limit_train_batches=0.1", {}),
    ],
)
def test_one_batch_is_not_all_of_them(argument: str, words: dict[str, object], tmp_path: Path) -> None:
    read = script(tmp_path, argument)
    assert read.words == {"clip": None, "precision": "fp32"} | words
    assert ("steps" in words) != ("steps" in read.asked)


def test_one_held_out_batch_is_not_all_of_them(tmp_path: Path) -> None:
    assert "trainer.limit_val_batches" in script(tmp_path, "max_steps=5, limit_val_batches=1").told("refused")
    assert "trainer.limit_val_batches" in script(tmp_path, "max_steps=5, limit_val_batches=1.0").told("unneeded")


def test_no_held_out_batch_turns_evaluation_off(tmp_path: Path) -> None:
    assert script(tmp_path, "max_steps=5, limit_val_batches=0").words["evaluate.every"] == 0


def test_a_clip_of_each_value_is_no_clip_of_the_norm(tmp_path: Path) -> None:
    read = script(tmp_path, "max_steps=5, gradient_clip_val=0.5, gradient_clip_algorithm='value'")
    assert "clip" not in read.words and read.asked - PARTS == {"clip"}


def test_several_trainers_say_what_is_alike_in_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "fit = Trainer(max_steps=10, precision='bf16-mixed', gradient_clip_val=1.0)\ntest = Trainer(max_steps=10, precision=32, gradient_clip_val=1.0)\n"
    )
    read = imported(path)
    assert read.words == {"steps": 10, "clip": 1.0}
    assert read.asked - PARTS == {"precision"}
    assert (
        "bf16-mixed or 32" in read.recipe
        and "several calls in this file give different values" in read.told("refused")["trainer.precision"]
    )


def test_batches_that_are_no_whole_steps(tmp_path: Path) -> None:
    read = script(tmp_path, "accumulate_grad_batches=4, val_check_interval=1001")
    assert "not a multiple of" in read.told("refused")["trainer.val_check_interval"]


def test_epochs_beside_steps_are_not_forgotten(tmp_path: Path) -> None:
    assert (
        "whichever comes first" in script(tmp_path, "max_steps=100, max_epochs=3").told("refused")["trainer.max_epochs"]
    )


def test_arguments_in_a_mapping_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "common = dict(devices=2, precision='16-mixed')\nmore = {'max_steps': 10, 'gradient_clip_val': 0.5, **common}\ntrainer = Trainer(**more, num_nodes='2')\n"
    )
    assert imported(path).words == {"devices": 2, "precision": "fp16", "steps": 10, "clip": 0.5, "nodes": 2}


@pytest.mark.parametrize(
    "source",
    [
        "",
        "more = load()\n",
        "more = {**load()}\n",
        "more = {}\nmore['precision'] = 16\n",
        "more = {}\nmore.update(load())\n",
    ],
)
def test_arguments_that_the_file_does_not_hold_leave_no_default_of_theirs(source: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{source}trainer = Trainer(max_steps=10, **more)\n")
    read = imported(path)
    assert read.asked - PARTS == {"precision", "clip"} and "clip" not in read.words
    assert any("**" in key for key in read.told("refused"))


@pytest.mark.parametrize(
    "change",
    [
        "parts.append(Other())",
        "parts[0].every = 3",
        "parts += [Other()]",
        "parts[0] = Other()",
        "del parts[0]",
        "for parts in x: pass",
        "def f(parts): pass",
    ],
)
def test_a_value_that_the_file_changes_is_not_the_first_one(change: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"parts = [TQDMProgressBar()]\n{change}\ntrainer = Trainer(max_steps=10, callbacks=parts)\n")
    assert "trainer.callbacks" in imported(path).told("refused")


def test_parts_that_change_in_a_run_are_asked_for(tmp_path: Path) -> None:
    read = script(tmp_path, "max_steps=5, accumulate_grad_batches={0: 8, 4: 4}")
    assert read.asked - PARTS == {"accumulate", "microbatch"}


WHOLE = """
import lightning as L
from mine import Faces, Digits
class Lit(L.LightningModule):
    def __init__(self, hidden, lr=0.1): ...
if __name__ == "__main__":
    L.seed_everything(7)
    model = Lit(64, lr=0.2)
    trainer = L.Trainer(max_epochs=3)
    trainer.fit({arguments})
"""


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        ("model, DataLoader(Faces(train=True), batch_size=8)", "data.dataset._target_=mine.Faces data.dataset.train=true trust=[mine]"),
        ("model=model, train_dataloaders=DataLoader(dataset=Faces())", "data.dataset._target_=mine.Faces trust=[mine]"),
        ("model, datamodule=Digits(batch_size=32)", "mine.Digits contains its own loaders"),
        ("model, Digits(32)", "mine.Digits contains its own loaders"),
    ],
)  # fmt: skip
def test_the_seed_the_classes_and_their_arguments_are_told(arguments: str, data: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(WHOLE.replace("{arguments}", arguments))
    read = imported(path)
    assert read.words["seed"] == 7
    assert "model._target_=train.Lit model.hidden=64 model.lr=0.2 trust=[train]" in read.command["model"]
    assert data in read.told("refused")["data"]
    path.write_text(path.read_text().replace("L.seed_everything(7)", "torch.manual_seed(args.seed)"))
    assert "seed" not in imported(path).words and "Type seed=" in imported(path).told("refused")["seed_everything"]


CONFIGURED = """
import lightning as L
import torch
class Lit(L.LightningModule):
    def __init__(self, hidden, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
    def configure_optimizers(self):
        optimizer = {optimizer}
        return [optimizer], [{scheduler}]
    def training_step(self, batch): ...
if __name__ == "__main__":
    train, val = random_split(Faces(), [80, 20], generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(max_epochs=3)
    trainer.fit(Lit(64, lr=0.002), DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=32))
"""
ADAMW = {
    "optim": "adamw", "optim.lr": 0.002, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8, "optim.weight_decay": 0.01,
}  # fmt: skip
COSINE = {"schedule": "cosine", "schedule.warmup": 0, "schedule.floor": 0.0}


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "words"),
    [
        ("torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)", "CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)", {**ADAMW, **COSINE}),
        ("torch.optim.AdamW(self.parameters(), self.hparams.lr)", "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3, 2e-4)", {**ADAMW, **COSINE, "schedule.floor": 0.1}),
        ("torch.optim.AdamW(self.parameters(), 2e-3)", "CosineAnnealingLR(optimizer, T_max=50)", {**ADAMW, "schedule": "???"}),
        ("torch.optim.AdamW(self.parameters(), 2e-3)", "StepLR(optimizer, 2)", {**ADAMW, "schedule": "???"}),
        ("torch.optim.AdamW(self.parameters(), 2e-3)", "get_linear_schedule_with_warmup(optimizer, 9, 99)", {**ADAMW, "schedule": "linear", "schedule.warmup": 9, "schedule.floor": 0.0}),
        ("Lion(self.parameters(), lr=1e-4)", "StepLR(optimizer, 2)", {"optim": "???", "schedule": "???"}),
        ("own(self)", "StepLR(optimizer, 2)", {"optim": "???", "schedule": "???"}),
    ],
)  # fmt: skip
def test_a_module_with_a_scheduler_is_given_both_as_words(
    optimizer: str, scheduler: str, words: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(CONFIGURED.format(optimizer=optimizer, scheduler=scheduler))
    read = imported(path)
    known = {word: value for word, value in read.ledger.words.items() if word.split(".")[0] in ("optim", "schedule")}
    assert {word: value for word, value in known.items() if words.get(word) != "???"}.items() >= {
        word: value for word, value in words.items() if value != "???"
    }.items()
    assert all(known[word] == "???" for word, value in words.items() if value == "???")
    assert not any(text.startswith("<lightning") for word, text in read.command.items() if word == "optim")


def test_what_a_script_says_besides_is_told_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(CONFIGURED.format(optimizer="SGD(self.parameters(), 0.1)", scheduler="ConstantLR(optimizer)"))
    read = imported(path)
    assert "seed" not in read.words and "seed_everything" not in read.told("refused"), (
        "a generator's seed is not the run's"
    )
    assert "data.holdout_dataset._target_=" in read.told("refused")["evaluation"]
    assert "not given  batch" not in read.recipe
    (tmp_path / "mine.yaml").write_text(read.recipe)
    typed = [f"recipe={tmp_path}/mine.yaml", "data.holdout_dataset._target_=torch.nn.Identity"]
    with pytest.raises(WordsError) as error:
        compose(typed)
    assert "data.holdout to you" not in str(error.value) and "leaves data to you" in str(error.value)


LOADED = """
import argparse
import lightning as L
from torch.utils.data import DataLoader
{above}
class Data(L.LightningDataModule):
    def __init__(self, folder, batch_size=16):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
    def train_dataloader(self):
        return DataLoader(self.train, {size}, num_workers=2)
    def val_dataloader(self):
        return DataLoader(self.held, batch_size=512)
L.Trainer(max_epochs=2{more}).fit(Model(), datamodule=Data("faces"{given}))
"""


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"size": "batch_size=32"}, {"microbatch": 32, "accumulate": 1}),
        ({"size": "32", "more": ", accumulate_grad_batches=4"}, {"microbatch": 32, "accumulate": 4}),
        ({"size": "batch_size=SIZE", "above": "SIZE = 24"}, {"microbatch": 24, "accumulate": 1}),
        ({"size": "batch_size=self.batch_size"}, {"microbatch": 16, "accumulate": 1}),
        ({"size": "batch_size=self.batch_size", "given": ", 64"}, {"microbatch": 64, "accumulate": 1}),
        ({"size": "batch_size=self.hparams.batch_size", "given": ", batch_size=8"}, {"microbatch": 8, "accumulate": 1}),
        (
            {
                "above": "p = argparse.ArgumentParser()\np.add_argument('--size', type=int, default=48)\nargs = p.parse_args()",
                "size": "batch_size=self.batch_size",
                "given": ", batch_size=args.size",
            },
            {"microbatch": 48, "accumulate": 1},
        ),
        ({"size": "batch_size=measured()"}, {"microbatch": "???"}),
        ({"size": "sampler=mine"}, {"batch": "???"}),
    ],
)
def test_the_batch_is_read_from_the_loader(parts: dict[str, str], words: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOADED.format(**{"above": "", "more": "", "given": "", **parts}))
    read = imported(path)
    known = {word: value for word, value in read.ledger.words.items() if word in ("batch", "microbatch", "accumulate")}
    assert known == words
