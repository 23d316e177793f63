"""The cells of the quarter, in the order of their value: what each decides, its seconds, its command."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPES: dict[str, dict[str, int]] = {
    "124M": {
        "vocab": 50304, "layers": 12, "heads": 12, "kv_heads": 12, "width": 768, "hidden": 2048, "sequence": 1024, "batch": 32, "microbatch": 32,
    },
    "1B": {
        "vocab": 128256, "layers": 16, "heads": 32, "kv_heads": 8, "width": 2048, "hidden": 8192, "sequence": 4096, "batch": 8, "microbatch": 2,
    },
    "tiny": {"vocab": 512, "layers": 2, "heads": 4, "kv_heads": 4, "width": 64, "hidden": 128, "sequence": 32, "batch": 4, "microbatch": 4},
}  # fmt: skip
"""Arguments of a GPT, and a step of one rank: GPT-2 124M, Llama 1B (1.5B with its head), and what stands for both on a CPU."""
FIRST = ("tests/objective/test_fused.py", "tests/backend/test_nccl.py", "tests/parallel/test_kernels.py")
"""Files of tests for a GPU that take seconds."""


@dataclass(frozen=True)
class Cell:
    """`seconds` it takes as a rule, `most` before it is ended. `needs`: packages beside torch; `ranks`: GPUs."""

    name: str
    decides: str
    seconds: float
    most: float
    command: tuple[str, ...]
    needs: tuple[str, ...] = ("dtrain",)
    ranks: int = 1


def cells(on: str, devices: int, kept: Path) -> list[Cell]:
    """All of them; files and runs that they leave lie in `kept`."""
    return [*measured(on, kept), *tested(on), *steps(on, devices, kept)]


def measured(on: str, kept: Path) -> list[Cell]:
    gpt2, llama = (SHAPES["tiny" if on == "cpu" else name] for name in ("124M", "1B"))
    tokens, microbatch = (shape["microbatch"] * shape["sequence"] for shape in (gpt2, llama))
    profile = f"profile={kept / 'kernels.txt'}"

    def ours(*runs: str, mark: str = "") -> tuple[str, ...]:
        return python("-m", "tests.gpu.runs", str(kept / "runs"), *filter(None, [mark]), *runs)

    def by_hand(shape: dict[str, int], *variants: str, mark: str = "") -> tuple[str, ...]:
        return python(
            "-m", "tests.gpu.loops", json.dumps({**shape, "on": on}), *filter(None, [mark]),
            *(in_small(each) if on == "cpu" else each for each in variants),
        )  # fmt: skip

    a, b = words(gpt2, on), words(llama, on)
    mlp = f"model=mlp objective=classification batch=32 log.every={10 if on == 'cpu' else 250}"
    return [
        Cell("card", "the kernel of attention; rows of a chunk; dW added in its product or after it", 15, 45, python("-m", "tests.gpu.card", on), ()),
        Cell("dtrain-124M", "the ratio to the bar; where the ms are", 90, 130, ours(
            f"auto: {a}", f"half: {a} objective.chunk={tokens // 2}", f"one chunk: {a} objective.chunk={tokens}", f"whole: {a} objective.chunk=0",
            f"compile=model: {a.replace('compile=blocks', 'compile=model')}", mark=profile,
        )),
        Cell("hand-124M", "the bar, and what each of its parts is worth", 110, 150, by_hand(
            gpt2, "blocks: blocks", "apart: blocks+split+scale", "whole: whole", "bf16: whole+bf16", f"one chunk: whole+bf16+chunk={tokens}",
            f"half: whole+bf16+chunk={tokens // 2}", "no sync: whole+bf16+nosync", "no clip: whole+bf16+clipin", mark=profile,
        ), ()),
        Cell("dtrain-1B", "MFU and memory", 80, 110, ours(f"auto: {b}", f"one chunk: {b} objective.chunk={microbatch}", mark=profile)),
        Cell("hand-1B", "the bar", 90, 120, by_hand(llama, "blocks: blocks", "bf16: blocks+bf16", f"one chunk: blocks+bf16+chunk={microbatch}"), ()),
        Cell("tests", "kernels of the loss and of the ring, NCCL", 60, 90, marked(on, FIRST), ("dtrain", "pytest")),
        Cell("small", "the step of a small model beside the usual loop", 45, 60, python(
            "tests/bench/overhead.py", *(("--rounds", "1", "--steps", "120") if on == "cpu" else ("--rounds", "2", "--steps", "300")),
        )),
        Cell("small-words", "whether a small model is compiled and bf16 by default", 25, 50, ours(
            f"defaults: {mlp}", f"bf16: {mlp} precision=bf16 compile=none", f"bf16, compiled: {mlp} precision=bf16 compile={'blocks' if on == 'cuda' else 'none'}",
        )),
        Cell("1B-bf16_true", "memory and time beside what is predicted", 50, 60, ours(f"bf16_true: {words(llama, on, 'precision=bf16_true')}")),
        Cell("1B-remat", "memory and time beside what is predicted", 50, 60, ours(f"remat: {b} remat=full")),
        Cell("losses", "the loss alone beside whole logits", 40, 120, python(
            "tests/bench/losses.py", "loss", *(("--types", "fp32", "--rounds", "1", "--sizes", "256,32,8192") if on == "cpu"
            else ("--types", "bf16", "--sizes", "32768,768,50304", "8192,2048,128256")),
        )),
    ]  # fmt: skip


def tested(on: str) -> list[Cell]:
    return [Cell("tests-rest", "all other tests marked gpu", 150, 300, marked(on, rest()), ("dtrain", "pytest"))]


STEPS: dict[str, tuple[str, float, float, int]] = {
    "doctor": ("nothing would stop a run", 25, 120, 1),
    "waits": ("no wait for the GPU in a step in which nothing is due", 15, 120, 1),
    "graphs": ("blocks that are alike are compiled once, without a break", 30, 180, 1),
    "spike": ("a gradient that is no number is left out and noted, once", 20, 60, 1),
    "one-each": ("each rank has a GPU of its own", 20, 60, 1),
    "axes": ("every axis has the losses of one rank", 200, 600, 2),
    "bandwidth": ("collectives are right; their bus bandwidth", 30, 120, 2),
    "offload": ("strategy.offload=cpu has the losses of a run without it", 40, 120, 2),
    "kill-resume": ("after SIGKILL the same words end with the same losses", 60, 180, 2),
    "named": ("an error, a kill and a hang name the rank in time", 80, 200, 2),
    "fsdp": ("the step under FSDP beside the loop by hand", 200, 400, 2),
    "overlap": ("half of the communication at least is hidden", 90, 200, 2),
}
"""Step of steps.py -> what it must show, seconds, most seconds, ranks."""


def steps(on: str, devices: int, kept: Path) -> list[Cell]:
    return [
        Cell(name, shows, seconds, most, python("-m", "tests.gpu.steps", name, on, str(devices), str(kept / name)), ranks=ranks)
        for name, (shows, seconds, most, ranks) in STEPS.items()
    ]  # fmt: skip


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def words(shape: dict[str, int], on: str, precision: str = "precision=bf16") -> str:
    """That make a run of dtrain of this shape; in small it is not compiled."""
    model = [f"model.{name}={shape[name]}" for name in ("vocab", "layers", "heads", "kv_heads", "width", "hidden")]
    batch = [f"{name}={shape[name]}" for name in ("batch", "microbatch")]
    data = [f"data.sequence={shape['sequence']}", f"data.vocab={min(shape['vocab'], 50000)}"]
    fast = [precision, "compile=blocks"] if on == "cuda" else ["precision=fp32", "compile=none"]
    return " ".join([*model, *data, *batch, *fast])


def in_small(variant: str) -> str:
    """The variant of a loop by hand without what takes a CPU long: compiling, and products in 16 bits."""
    name, _, said = variant.partition(": ")
    return f"{name}: {'+'.join('none' if word in ('blocks', 'whole') else word for word in said.split('+') if word != 'bf16')}"


def marked(on: str, files: tuple[str, ...]) -> tuple[str, ...]:
    """The tests marked gpu of some files; without a GPU they are only collected."""
    small = ("--collect-only",) if on == "cpu" else ()
    return python("-m", "pytest", "-m", "gpu", "-q", "-rf", "--workers", "0", *small, *files)


def rest() -> tuple[str, ...]:
    """Files that have tests for a GPU, marked by a decorator or on a parameter, and are not among the first."""
    pages = (
        str(page.relative_to(ROOT))
        for page in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in page.read_text()
    )
    return tuple(page for page in pages if page not in FIRST)


def obstacle(cell: Cell, missing: set[str], devices: int) -> str:
    """Why a cell cannot run here; empty when it can."""
    if lacking := missing & set(cell.needs):
        return f"needs {' and '.join(sorted(lacking))}"
    return f"needs {cell.ranks} GPUs" if cell.ranks > devices else ""
