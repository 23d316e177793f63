"""Example files of other tools, imported and planned as a user would."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.integrations.importers import complete, load, recognise, translate
from dtrain.integrations.importers.ledger import Ledger
from dtrain.integrations.importers.read import parse
from dtrain.integrations.importers.write import recipe
from dtrain.planned import Plan
from dtrain.resolve import resolve

TYPED = {
    "steps": 100, "optim": "adamw", "optim.lr": 1e-3, "optim.betas": "[0.9,0.99]", "optim.eps": 1e-8, "optim.weight_decay": 0, "schedule": "constant",
    "schedule.warmup": 0, "precision": "fp32", "clip": 1.0, "model": "gpt", "data": "text", "batch": 840, "microbatch": 1,
    "adapter": "lora", "adapter.rank": 8, "adapter.alpha": 16, "adapter.targets": "[q_proj]", "objective": "next_token", "data.path": "rows.jsonl",
    "data.template": "null", "data.tokenizer": "tuned", "data.sequence": 512, "data.train_on": "answers", "data.holdout": 0.1,
}  # fmt: skip
"""For every word that a file may leave open."""
OF_CODE = {"model", "data", "data.holdout"}
COUNTED = {"epochs": "steps=50", "evaluate.every": "evaluate.every=50", "checkpoint.every": "checkpoint.every=100"}
"""What is typed in place of epochs, which no data is here to count."""
WATCHED, DIRECTIONS = ("stop.metric", "checkpoint.best"), ("stop.best_is", "checkpoint.best_is")
"""What names a figure, and its direction: a run of these tests has eval_loss alone."""
FILES = Path(__file__).parent / "integrations/importers/files"


@dataclass
class Imported:
    name: str
    ledger: Ledger
    recipe: str

    def told(self, kind: str) -> dict[str, str]:
        return {entry.key: entry.why for entry in self.ledger.entries if entry.kind == kind}

    @property
    def words(self) -> dict[str, Any]:
        """What the recipe decides."""
        return {word: value for word, value in self.ledger.words.items() if value != "???"}

    @property
    def asked(self) -> set[str]:
        """What it leaves open, and the command asks for, but for what nearly every file leaves to code."""
        return self.open - OF_CODE

    @property
    def open(self) -> set[str]:
        return {word for word in self.command if self.ledger.asks(word)}

    @property
    def command(self) -> dict[str, str]:
        return self.ledger.command

    @property
    def counted(self) -> list[str]:
        watched = [f"{word}=eval_loss" for word in WATCHED if word in self.words]
        watched += [f"{word}=lowest" for word in DIRECTIONS if self.words.get(word) == "highest"]
        return watched + [
            COUNTED[word] for word in COUNTED if word == "epochs" in self.words or self.words.get(word) == "epoch"
        ]

    def plan(self, folder: Path, *more: str, gpus: int = 0) -> Plan:
        """Of the recipe as it is printed, the trust that its header names, and something for what it asks."""
        path = folder / "recipe.yaml"
        path.write_text(self.recipe)
        trust = [f"trust={self.command['trust']}"] if "trust" in self.command else []
        answers = [f"{word}={TYPED[word]}" for word in TYPED if self.ledger.words.get(word) == "???"]
        return resolve(compose([f"recipe={path}", *trust, *answers, *self.counted, *more]), Cluster(gpus=gpus, cpus=2))


def imported(path: Path) -> Imported:
    tree = parse(path.read_bytes(), str(path))
    name = recognise(tree, str(path))
    ledger = translate(tree, name, str(path))
    complete(ledger, load(name).SILENT)
    return Imported(name, ledger, recipe(ledger, load(name).SILENT, "mine.yaml"))


@cache
def example(name: str) -> Imported:
    return imported(FILES / name)


def keys(path: Path) -> list[str]:
    """The names of all values of a file that is no Python, counted without dtrain."""
    text = path.read_text()
    read = {".json": json.loads, ".yaml": yaml.safe_load, ".toml": tomllib.loads}[path.suffix]
    return sorted(_leaves(read(text), ()))


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[str]:
    below = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    if below and (isinstance(node, dict) or any(isinstance(value, dict) for _, value in below)):
        for name, value in below:
            yield from _leaves(value, (*path, str(name)))
    else:
        yield ".".join(path)
