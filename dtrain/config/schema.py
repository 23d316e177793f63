"""The typed schema of the top level: what was asked, before anything is decided."""

from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"
"""What OmegaConf takes for a value that must be given."""

GROUPS = (
    "launcher", "backend", "strategy", "precision", "remat", "compile", "model", "data", "objective", "optim", "schedule", "checkpoint", "logger", "hook", "cluster",
)  # fmt: skip
"""Folders of conf/; one word of each makes a run (logger and hook take a list of words)."""

VERBS = {
    "train": "run it (the default, so it may be left out); -m for a sweep",
    "plan": "what would happen, without doing it",
    "evaluate": "held-out loss of a run's newest checkpoint",
    "generate": "text from a run's newest checkpoint",
    "verify": "a few steps of it, stopped and resumed, against one process",
    "recipes": "complete runs at hand, or in a folder or at a URL",
    "checkpoint": "ls, verify, export: what was saved",
    "import": "a config of another tool as a recipe",
    "doctor": "what this machine, a storage and the ranks of the words can do",
    "runs": "runs in a folder or at a URL: when, what was changed, how far, how good; best, rm",
    "diff": "what differs between runs, recipes or lists of words",
    "completion": "bash, zsh or fish: a script with which the shell completes all of this",
}
"""What the command can do: one file of dtrain/verb/ each."""
LISTS = ("logger", "hook")
"""Groups that take a list of words, each in a package of its own."""

ALLOWED: dict[str, Any] = {
    "nodes": "whole from 1 to 100000 or between",
    "devices": "whole from 1 to 1000 or auto",
    "steps": "whole from 1 steps",
    "epochs": "above 0 or null",
    "batch": "whole from 1 to 1000000000 samples",
    "microbatch": "whole from 1 to 1000000000 samples or null",
    "accumulate": "whole from 1 to 1000000000 or null",
    "seed": "whole from 0",
    "clip": "above 0 or null",
    "ema": "from 0 below 1 or null",
    "out": "text or null",
    "out_options": "mapping",
    "resume": ["auto", "never", "must"],
    "init": "text or null",
    "on_spike": ["stop", "skip", "rewind"],
    "stop_after": "whole from 1 steps or null",
    "time_limit": "above 0 seconds or clock or null",
    "grace": "from 0 seconds",
    "trust": "list of text",
    "loop": "text",
    **dict.fromkeys(
        ("mesh.pp", "mesh.dp_replicate", "mesh.dp_shard", "mesh.cp", "mesh.tp", "mesh.ep"), "whole from 1 or null"
    ),
    "pipeline.schedule": [
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv",
        "dualpipev",
    ],
    "pipeline.stages": "whole from 1 or null",
    "pipeline.split": "blocks or cost or list of whole from 1",
    "tensor.sequence": ["whole", "split"],
    "tensor.loss": ["whole", "split"],
    "context.attention": ["ring", "ulysses"],
    "spike.sigma": "above 0 deviations or auto or null",
    "spike.window": "whole from 8 steps",
    "log.every": "whole from 1 steps",
    "evaluate.every": "whole from 0 steps",
    "evaluate.samples": "whole from 1 samples or null",
    "generate.prompt": "some text",
    "generate.tokens": "whole from 1 tokens",
    "generate.temperature": "from 0",
    "verify.steps": "whole from 1 steps",
    "requires.versions": "list of text",
    "requires.gpus": "whole from 0 or null",
    "requires.memory": "above 0 GiB or null",
    "expect.step": "whole from 1 steps or null",
    **dict.fromkeys(
        (f"expect.{figure}" for figure in ("loss", "accuracy", "eval_loss", "eval_accuracy")), "band or null"
    ),
    **dict.fromkeys(
        (f"expect.{figure}" for figure in ("memory", "samples_per_second", "tokens_per_second")), "band or null"
    ),
    "expect.hardware": "text or null",
    "expect.small": "list of text",
    "sweep.out": "text or null",
}
"""What each plain key may be, in the words of dtrain/config/constraints.py; what an argument of a word may be stands in
its file.
"""


@dataclass
class Mesh:
    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None
    ep: int | None = None


@dataclass
class Pipeline:
    schedule: str = MISSING
    stages: int | None = None
    split: Any = MISSING


@dataclass
class Tensor:
    sequence: str = MISSING
    loss: str = MISSING


@dataclass
class Context:
    attention: str = MISSING


@dataclass
class Spike:
    sigma: Any = MISSING
    window: int = MISSING


@dataclass
class Log:
    every: int = MISSING


@dataclass
class Evaluate:
    every: int = MISSING
    samples: int | None = None


@dataclass
class Generate:
    prompt: str = MISSING
    tokens: int = MISSING
    temperature: float = MISSING


@dataclass
class Verify:
    steps: int = MISSING


@dataclass
class Sweep:
    out: str | None = None


@dataclass
class Requires:
    versions: list[str] = field(default_factory=list)
    gpus: int | None = None
    memory: float | None = None


@dataclass
class Expect:
    step: int | None = None
    loss: list[Any] | None = None
    accuracy: list[Any] | None = None
    eval_loss: list[Any] | None = None
    eval_accuracy: list[Any] | None = None
    memory: list[Any] | None = None
    samples_per_second: list[Any] | None = None
    tokens_per_second: list[Any] | None = None
    hardware: str | None = None
    small: list[str] = field(default_factory=list)


@dataclass
class Schema:
    """Types of the top level; the values and their sentences stand in conf/config.yaml."""

    nodes: Any = MISSING
    devices: Any = MISSING
    steps: int = MISSING
    epochs: float | None = None
    batch: int = MISSING
    microbatch: int | None = None
    accumulate: int | None = None
    seed: int = MISSING
    clip: float | None = None
    ema: float | None = None
    out: str | None = None
    out_options: dict[str, Any] = field(default_factory=dict)
    resume: str = MISSING
    init: str | None = None
    on_spike: str = MISSING
    stop_after: int | None = None
    time_limit: Any = None
    grace: float = MISSING
    trust: list[str] = field(default_factory=list)
    loop: str = MISSING
    mesh: Mesh = field(default_factory=Mesh)
    pipeline: Pipeline = field(default_factory=Pipeline)
    tensor: Tensor = field(default_factory=Tensor)
    context: Context = field(default_factory=Context)
    spike: Spike = field(default_factory=Spike)
    log: Log = field(default_factory=Log)
    evaluate: Evaluate = field(default_factory=Evaluate)
    generate: Generate = field(default_factory=Generate)
    verify: Verify = field(default_factory=Verify)
    requires: Requires = field(default_factory=Requires)
    expect: Expect = field(default_factory=Expect)
    sweep: Sweep = field(default_factory=Sweep)
    launcher: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    remat: dict[str, Any] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    hook: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config(Schema):
    """A composed Schema with where everything came from."""

    choices: dict[str, Any] = field(default_factory=dict)
    """group -> word, or list of words."""
    sources: dict[str, str] = field(default_factory=dict)
    """dotted key -> `command line` or the recipe that set it; absent: the default of its conf file."""
    history: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """dotted key -> (value, source) of every word that another took the place of, the oldest first."""
    unresolved: dict[str, str] = field(default_factory=dict)
    """dotted key -> what was said, where that reads the environment."""
    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """group -> word -> its arguments, for every group: what `auto` may pick from."""
