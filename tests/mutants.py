"""Command lines and recipes that went wrong on the way from the head to the keyboard: valid ones, mutated by seed."""

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

VALID: tuple[tuple[str, ...], ...] = (
    ("plan", "steps=20", "batch=8", "optim.lr=3e-3"),
    ("plan", "strategy=fsdp", "nodes=2", "devices=2", "strategy.reshard=never"),
    ("plan", "strategy=hsdp", "nodes=2", "devices=2", "microbatch=1"),
    ("plan", "strategy=ddp", "devices=4", "accumulate=2", "mesh.tp=2"),
    ("plan", "mesh.pp=2", "devices=2", "pipeline.schedule=gpipe", "accumulate=4"),
    ("plan", "mesh.cp=2", "devices=2", "context.attention=ulysses", "data.sequence=32"),
    ("plan", "model=moe", "model.experts=4", "mesh.ep=2", "devices=2", "optim=sgd"),
    ("plan", "model=mlp", "data=synthetic", "objective=regression", "model.layers=2", "model.width=32"),
    ("plan", "model=cnn", "data=synthetic", "precision=bf16", "schedule=wsd", "schedule.decay=0.5"),
    ("plan", "data=tokens", "data.path=tokens.npy", "model.heads=2", "model.width=64", "remat=full"),
    ("plan", "logger=[console]", "hook=[sample]", "hook.sample.every=5", "checkpoint.every=10", "checkpoint.keep=null"),
    ("plan", "out=runs/a", "resume=never", "seed=3", "clip=0.5", "ema=0.99", "time_limit=1:00:00", "grace=5"),
    ("plan", "on_spike=skip", "spike.sigma=4", "spike.window=16", "evaluate.every=5", "evaluate.samples=null"),
    ("plan", "optim=muon", "optim.betas=[0.9,0.99]", "launcher=local", "launcher.restarts=1", "generate.prompt='a, b'"),
    ("plan", "recipe=shakespeare", "steps=10", "model.tied=false"),
    ("train", "model=mlp", "data=synthetic", "steps=2", "batch=4"),
    ("verify", "strategy=zero2", "devices=2", "verify.steps=3", "strategy.offload=none"),
    ("-m", "optim.lr=1e-3,3e-3", "seed=0,1", "sweep.out=runs/s"),
    ("evaluate", "out=runs/b", "batch=4"),
    ("generate", "out=runs/b", "generate.tokens=5"),
    ("checkpoint", "ls", "out=runs/b"),
)
NUMBERS = (
    "0",
    "-1",
    "1e400",
    "99999999999999999999999",
    "nan",
    "inf",
    "-inf",
    "1.5",
    "1e-3s",
    "8k",
    "10m",
    "3 parsecs",
    "0x10",
    "1_0",
    "٣",
    "1/2",
    "50%",
    "007",
    "+1",
)
VALUES = (*NUMBERS, "", "null", "true", "[]", "{}", "[1,2]", "{a:1}", "${oops}", "${oc.env:NOT_SET}", "${seed}", "a b", "'", '"x', "[1", "{a:", "(", "é", "\u202e", "\\", "\n", "a=b", "http://127.0.0.1:9/p?a=b&c=d", "x" * 3000)  # fmt: skip
FOREIGN = ("--strategy", "fsdp", "--learning-rate", "1e-3", "-lr=3", "--config=a.json", "--nproc_per_node=2", "trainer.max_epochs=3", "optimizer.lr=1", "--deepspeed", "lr: 3", "=", "==", "=x", "a", "-", "--", "~optim", "hydra.run.dir=x", "hydra/launcher=joblib", "@x=1", "a@b=1", "a/b=1", ".=1", "a..b=1", "optim..lr=1", "optim.lr.x=1", "$x=1", "batch=", "plan", "-mm", "-c")  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """`words` to type; `recipe` a text that stands in the file the word recipe=mutant.yaml names, or None."""

    seed: int
    words: tuple[str, ...]
    recipe: str | None = None


def mutant(seed: int) -> Mutant:
    """The same seed, the same mutant. Every fifth is a recipe."""
    draw = random.Random(seed)
    words = list(draw.choice(VALID))
    if seed % 5 == 4 and words[0] in ("plan", "train"):
        text = _as_recipe(words[1:])
        for _ in range(draw.randint(1, 3)):
            text = draw.choice(SLIPS)(text, draw)
        return Mutant(seed, (words[0], "recipe=mutant.yaml"), text)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(words))
        words = draw.choice(CHANGES)(words, at, draw)
    return Mutant(seed, tuple(words))


def _letters(words: list[str], at: int, draw: random.Random) -> list[str]:
    return [*words[:at], _typo(words[at], draw), *words[at + 1 :]]


def _typo(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text)) if text else 0
    letter = draw.choice(string.ascii_lowercase + string.digits + "._-=[],{}'\" éß/\\:;#!&|<>*?$@")
    return draw.choice((text[:at] + text[at + 1 :], text[:at] + text[at : at + 1] + text[at:], text[:at] + letter + text[at:], text[:at] + letter + text[at + 1 :], text[:at] + text[at : at + 2][::-1] + text[at + 2 :]))  # fmt: skip


def _value(words: list[str], at: int, draw: random.Random) -> list[str]:
    return [*words[:at], f"{words[at].split('=')[0]}={draw.choice(VALUES)}", *words[at + 1 :]]


def _swapped(words: list[str], at: int, draw: random.Random) -> list[str]:
    other = draw.choice(draw.choice(VALID))
    return [*words[:at], f"{words[at].split('=')[0]}={other.partition('=')[2]}", *words[at + 1 :]]


def _foreign(words: list[str], at: int, draw: random.Random) -> list[str]:
    return [*words[:at], *draw.sample(FOREIGN, draw.randint(1, 2)), *words[at:]]


def _signs(words: list[str], at: int, draw: random.Random) -> list[str]:
    return [*words[:at], draw.choice(("+", "++", "~", "--", "-", "+++", "@", " ")) + words[at], *words[at + 1 :]]


def _nested(words: list[str], at: int, draw: random.Random) -> list[str]:
    key, _, value = words[at].partition("=")
    return [*words[:at], draw.choice((f"{key}.{draw.choice(('x', 'lr', '_target_', '0'))}={value}", f"{key.split('.')[-1]}={value}", f"model.{key}={value}", f"{key}={{a:{value}}}", f"{key}=[{value}]")), *words[at + 1 :]]  # fmt: skip


def _twice(words: list[str], at: int, draw: random.Random) -> list[str]:
    return [*words, words[at]]


def _joined(words: list[str], at: int, draw: random.Random) -> list[str]:
    return [*words[:at], words[at].replace("=", draw.choice((" = ", ": ", ":=", "==", "= "))), *words[at + 1 :]]


CHANGES: Sequence[Callable[[list[str], int, random.Random], list[str]]] = (
    _letters,
    _letters,
    _letters,
    _value,
    _value,
    _swapped,
    _foreign,
    _signs,
    _nested,
    _twice,
    _joined,
)


def _as_recipe(words: list[str]) -> str:
    """The words in YAML, as far as a recipe may say them."""
    document: dict[str, Any] = {}
    groups = []
    for word in words:
        key, _, value = word.partition("=")
        if key in ("recipe", "out"):
            continue
        if "." not in key and key in (
            "strategy",
            "model",
            "data",
            "objective",
            "optim",
            "schedule",
            "precision",
            "remat",
            "launcher",
            "logger",
            "hook",
        ):
            groups.append({f"override /{key}": yaml.safe_load(value)})
            continue
        holder = document
        *path, name = key.split(".")
        for part in path:
            holder = holder.setdefault(part, {})
        holder[name] = yaml.safe_load(value)
    return "# @package _global_\n" + yaml.safe_dump(
        {"defaults": groups, **document} if groups else document, sort_keys=False
    )


def _line(text: str, draw: random.Random, change: Callable[[str], str]) -> str:
    lines = text.splitlines() or [""]
    at = draw.randrange(len(lines))
    return "\n".join([*lines[:at], change(lines[at]), *lines[at + 1 :]]) + "\n"


SLIPS: Sequence[Callable[[str, random.Random], str]] = (
    lambda text, draw: _line(text, draw, lambda line: _typo(line, draw)),
    lambda text, draw: _line(text, draw, lambda line: f"{line.split(':')[0]}: {draw.choice(VALUES)}"),
    lambda text, draw: _line(text, draw, lambda line: draw.choice((" ", "   ", "\t", "- ")) + line),
    lambda text, draw: _line(text, draw, lambda line: line.lstrip()),
    lambda text, draw: _line(
        text,
        draw,
        lambda line: line.replace(": ", draw.choice((":", "=", " : ", ": !!python/name:os.system ", ": &a ", ": *a "))),
    ),
    lambda text, draw: _line(
        text,
        draw,
        lambda line: (
            f"{line}\n{draw.choice(('---', '...', '%YAML 1.1', '<<: *x', '? a', '- x', 'a: &a [*a]', 'trust: [os]', 'hydra: {run: {dir: x}}', line))}"
        ),
    ),
    lambda text, draw: text.replace("\n", "\r\n"),
    lambda text, draw: text[: draw.randrange(len(text) + 1)],
)


def write(mutant: Mutant, folder: Path) -> None:
    if mutant.recipe is not None:
        (folder / "mutant.yaml").write_bytes(mutant.recipe.encode("utf-8", "surrogatepass"))
