"""What a rank holds, counted on real tensors in a real step, beside what theory says.

    python tests/bench/memory.py [--only 'zero3 2']

The gpt (8 layers x 128, hidden 384, vocabulary 256, fp32) or the moe with as many weights seen by a token, AdamW, 4 samples of 128 tokens
a step over the world. Ranks are forked and talk through gloo; after two steps that make optimizer state and buckets, a third is watched. After
every operator of it the storages that are alive are told apart by what they are for: parameters at rest (local pieces), gathered ones (what
FSDP2 gathers into), gradients (of parameters, whole ones that wait for their turn, buckets), optimizer state, flat buffers on their way between
ranks, samples. What is left are activations and whatever is short-lived. A storage counts once, with all its bytes.

Activations are counted in two ways that know nothing of each other: storages alive when a backward begins, the largest over the microbatches; and
storages held by the graph, by torch.autograd.graph.saved_tensors_hooks. The second misses what a checkpointed block keeps for itself.

Beside each figure stands counted / theory, where theory is the formula of its column; figures are KiB, of the rank that holds most.
Where one is off by more than 5% the last column says why.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from metering import count
from pool import ranks
from small import plan as plan_of

L, C, F, H, V, T, B = 8, 128, 384, 4, 256, 128, 4
E, K, FE = 8, 2, 192  # experts, those a token sees, their width
WORDS = (
    "data=synthetic", "objective=next_token", f"data.vocab={V}", f"data.sequence={T}", f"model.layers={L}", f"model.width={C}", f"batch={B}",
)  # fmt: skip

COLUMNS = {
    "rest": "parameters at rest", "peak": "at their peak", "gradients": "gradients at their peak", "end": "at the end", "state": "optimizer state",
    "kept": "activations kept",
}  # fmt: skip
PLAIN = {"hooks": "by hooks", "alive": "most alive in the step", "flight": "in flight"}

LEGEND = """\
Sizes of this model, KiB. Parameters: P all, b a block, R outside of blocks, h the head, D without experts, E the experts, d a block without
experts, e the experts of a block. Activations of the whole batch: X on the residual path and in norms, G what norms give to matrices, S inside
attention and feed-forward, Y the softmax, A all of the blocks, Z all behind them (X + G + S + Y = A + Z), I the inputs of blocks, M results of
matrix products and attention. `most alive`: activations and everything short-lived, at its peak. `in flight`: flat buffers of parameters and
gradients on their way, at their peak. A dash: nothing expected, nothing there."""


def sizes(moe: bool) -> dict[str, float]:
    """The letters of the formulas, in KiB."""
    expert = E * 3 * C * FE if moe else 0
    block = 4 * C * C + 2 * C + (E * C if moe else 3 * C * F)
    inside = 6 * C + 3 * H + (2 * K * C + 4 * K * FE if moe else 4 * F)
    parameters = {
        "P": L * (block + expert) + 2 * V * C + C, "b": block + expert, "d": block, "e": expert, "R": 2 * V * C + C, "h": V * C,
        "D": L * block + 2 * V * C + C, "E": L * expert,
    }  # fmt: skip
    a_token = {
        "X": L * (4 * C + 2) + 2 * C + 1, "G": L * 2 * C + C, "S": L * inside, "Y": V, "A": L * (6 * C + 2 + inside), "Z": 3 * C + 1 + V,
        "I": L * C, "M": L * (6 * C + 2 * F + H),
    }  # fmt: skip
    floats = parameters | {name: number * B * T for name, number in a_token.items()}
    return {name: number * 4 / 1024 for name, number in floats.items()}


@dataclass
class Case:
    """`theory`: the formulas that differ from those of one rank, by column; `why`: the letter of the reason where the figure is another;
    `rank`: the one shown, None: the one that holds most."""

    words: str
    world: int
    theory: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    rank: int | None = None

    def formula(self, column: str) -> str:
        alone = {"rest": "P", "peak": "P", "gradients": "P", "end": "P", "state": "2*P", "kept": "A+Z"}
        return (alone | self.theory)[column]


def sharded(ranks: int, peak: str, gradients: str, kept: str) -> dict[str, str]:
    n = ranks
    return {
        "rest": f"P/{n}",
        "peak": f"P/{n}+{peak}",
        "gradients": gradients,
        "end": f"P/{n}",
        "state": f"2*P/{n}",
        "kept": kept,
    }


def split(kept: str) -> dict[str, str]:
    return {"rest": "P/2", "peak": "P/2", "gradients": "P/2", "end": "P/2", "state": "P", "kept": kept}


WHY = {
    "a": "Torch's schedules keep a buffer to receive into for each of the 4 microbatches, and outputs that were sent.",
    "b": "FSDP2 over a shard axis of one rank copies the experts of a block while it runs.",
}
CASES = {
    "single": Case("", 1),
    "ddp 2": Case("strategy=ddp", 2, {"kept": "(A+Z)/2"}),
    "zero1 2": Case("strategy=zero1", 2, sharded(2, "P", "7*b/2+b+h", "(A+Z)/2")),
    "zero2 2": Case("strategy=zero2", 2, sharded(2, "P", "7*b/2+b+h", "(A+Z)/2")),
    "zero3 2": Case("strategy=zero3", 2, sharded(2, "R+b", "7*b/2+b+h", "(A+Z)/2")),
    "zero3 4": Case("strategy=zero3", 4, sharded(4, "R+b", "7*b/4+b+h", "(A+Z)/4")),
    "zero1 2, accumulate 2": Case("strategy=zero1 accumulate=2", 2, sharded(2, "P", "P", "(A+Z)/4")),
    "zero2 2, accumulate 2": Case("strategy=zero2 accumulate=2", 2, sharded(2, "P", "P/2+b+h", "(A+Z)/4")),
    "zero3 2, accumulate 2": Case("strategy=zero3 accumulate=2", 2, sharded(2, "R+b", "P/2+b+h", "(A+Z)/4")),
    "tp 2": Case("strategy=ddp mesh.tp=2", 2, split("X+G+S/2+Y")),
    "tp 2, sequence split": Case("strategy=ddp mesh.tp=2 tensor.sequence=split", 2, split("X/2+G+S/2+Y")),
    "tp 2, loss split": Case("strategy=ddp mesh.tp=2 tensor.loss=split", 2, split("X+G+S/2+Y/2")),
    "tp 2, both split": Case("strategy=ddp mesh.tp=2 tensor.sequence=split tensor.loss=split", 2, split("X/2+G+S/2+Y/2")),
    "pp 2, 1f1b, rank 0": Case("strategy=ddp mesh.pp=2 accumulate=4", 2, split("A/2*2/4"), {"kept": "a"}, rank=0),
    "pp 2, 1f1b, rank 1": Case("strategy=ddp mesh.pp=2 accumulate=4", 2, split("(A/2+Z)*1/4"), {"kept": "a"}, rank=1),
    "pp 2, gpipe, rank 0": Case("strategy=ddp mesh.pp=2 accumulate=4 pipeline.schedule=gpipe", 2, split("A/2"), rank=0),
    "pp 2, gpipe, rank 1": Case("strategy=ddp mesh.pp=2 accumulate=4 pipeline.schedule=gpipe", 2, split("A/2+Z"), rank=1),
    "cp 2, ring": Case("strategy=ddp mesh.cp=2", 2, {"kept": "(A+Z)/2"}),
    "cp 2, ulysses": Case("strategy=ddp mesh.cp=2 context.attention=ulysses", 2, {"kept": "(A+Z)/2"}),
    "moe, single": Case("model=moe", 1),
    "moe, ddp 2": Case("model=moe strategy=ddp", 2, {"kept": "(A+Z)/2"}),
    "moe, ep 2": Case(
        "model=moe strategy=ddp mesh.ep=2", 2,
        {"rest": "D+E/2", "peak": "D+E/2", "gradients": "D+E/2", "end": "D+E/2", "state": "2*(D+E/2)", "kept": "(A+Z)/2"},
    ),
    "moe, ep 2, zero3": Case(
        "model=moe mesh.ep=2 strategy=zero3", 2, sharded(2, "R+d", "7*(d+e)/2+d+e/2+h", "(A+Z)/2"), {"peak": "b"},
    ),
    "remat selective": Case("remat=selective", 1, {"kept": "I+M+Z"}),
    "remat budget, half": Case("remat=budget", 1, {"kept": "A/2+I/2+Z"}),
    "remat full": Case("remat=full", 1, {"kept": "I+Z"}),
}  # fmt: skip


def row(name: str, case: Case, counted: list[dict[str, int]], noted: set[str]) -> Iterator[str]:
    """The cells of a case; letters of the reasons it needs are added to `noted`."""
    letters, why = sizes("model=moe" in case.words), []
    yield name
    shown = counted if case.rank is None else [counted[case.rank]]
    for column in COLUMNS:
        found, formula = max(each[column] for each in shown) / 1024, case.formula(column)
        ratio = found / eval(formula, {}, letters)
        off = abs(ratio - 1) > 0.05
        why += [case.why.get(column, "not explained")] if off else []
        yield f"{found:,.0f} = {f'**{ratio:.2f}**' if off else f'{ratio:.2f}'} x {formula.replace('*', '·')}"
    for column in PLAIN:
        found = max(each[column] for each in shown) / 1024
        yield f"{found:,.0f}" if found else "-"
    noted.update(why)
    yield ", ".join(dict.fromkeys(why))


def main(only: str) -> None:
    names = [name for name in CASES if only in name]
    print(LEGEND, end="\n\n")
    for moe in (False, True):
        print(
            f"{'moe' if moe else 'gpt'}: "
            + ", ".join(f"{name} {value:,.0f}" for name, value in sizes(moe).items() if value),
            end="\n\n",
        )
    print("| " + " | ".join(["", *COLUMNS.values(), *PLAIN.values(), "why"]) + " |")
    print("|---" * (len(COLUMNS) + len(PLAIN) + 2) + "|")
    counted: dict[tuple[str, int], list[dict[str, int]]] = {}
    noted: set[str] = set()
    for name in names:
        case = CASES[name]
        key = (case.words, case.world)
        if key not in counted:
            counted[key] = ranks(
                case.world, count, plan_of(*WORDS, f"devices={case.world}", *case.words.split()), seconds=600
            )
        print("| " + " | ".join(row(name, case, counted[key], noted)) + " |", flush=True)
    print("", *(f"{letter}: {WHY[letter]}" for letter in sorted(noted & set(WHY))), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose name holds this")
    main(parser.parse_args().only)
