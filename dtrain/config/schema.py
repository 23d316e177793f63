"""The schema: one row per key, with its type, range, default, scope and sentence. Help, validation, conf/config.yaml
(dtrain/config/document.py) and the identity of a run are derived from it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal

from dtrain.config import files, sections
from dtrain.config.row import group, key, section

GROUPS = (
    "launcher", "backend", "strategy", "precision", "remat", "compile", "model", "adapter", "data", "objective",
    "optim", "schedule", "checkpoint", "logger", "hook", "cluster",
)  # fmt: skip
"""Folders of conf/; a run has one word of each (logger and hook take a list of words)."""

NAMED = {"pipeline.schedule": "pipeline"}
"""Key -> the folder of conf/ whose words it takes."""
LISTED = {"evaluate.metrics": "metric"}
"""Key -> the folder of conf/ of whose words it takes a list."""
HOLD_DATA = ("evaluate.sets", "predict.data")
"""Keys below which stand words of `data`, as in evaluate.sets.dev.path; dtrain/resolve/sets.py judges them."""
LISTS = ("logger", "hook")
"""Groups that take a list of words; the arguments of each are under `<group>.<word>`."""

Scope = Literal["mesh", "aside", "typed", "open", "closed"]


@dataclass
class Schema:
    """The top-level keys."""

    nodes: Any = key(
        "int >= 1 and <= 100000 or between",
        1,
        "machines; with launcher=local agents on this host; 1:2 (in YAML '1:2'): one or two, as many as join",
        "mesh open",
    )
    devices: Any = key(
        "int >= 1 and <= 1000 or auto", "auto", "processes per node; auto: one per GPU, or one on the CPU", "mesh open"
    )
    threads: Any = key(
        "int >= 1 and <= 1000 or auto",
        "auto",
        "CPU threads per rank, which affect the last bits of results; auto: OMP_NUM_THREADS, or the cores of this host "
        "divided by its ranks",
        "mesh open",
    )
    steps: int = key("int >= 1 steps", 1000, "optimizer steps of the whole run", "open")
    epochs: float | None = key(
        "number > 0 or null",
        None,
        "passes over the training data, instead of steps: epochs x its samples / batch, rounded up, counted before "
        "launch; needs data with an index",
        "open",
    )
    batch: int = key(
        "int >= 1 and <= 1000000000 samples",
        8,
        "samples per optimizer step, of all ranks: microbatch x data-parallel ranks x accumulate",
        "open",
    )
    microbatch: int | None = key(
        "int >= 1 and <= 1000000000 samples or null", None, "samples per forward on one rank", "mesh open"
    )
    accumulate: int | None = key(
        "int >= 1 and <= 1000000000 or null", None, "forwards per optimizer step on one rank", "mesh open"
    )
    seed: int = key("int >= 0", 0, "seed of all random numbers", "open")
    clip: float | None = key("number > 0 or null", 1.0, "largest gradient norm; null: no clipping", "open")
    ema: float | None = key(
        "number >= 0 and < 1 or null",
        None,
        "decay per step of an average of the weights, such as 0.999, which is saved and evaluated too; null: none",
        "open",
    )
    out: str | None = key(
        "text or null", None, "any fsspec URL; null: outputs/<name derived from the words>", "aside typed"
    )
    out_options: dict[str, Any] = key(
        "mapping",
        {},
        "fsspec options of the storage of `out`, such as out_options.endpoint_url=...; never written to a file",
        "aside typed",
    )
    resume: str = key(
        ["auto", "never", "must"],
        "auto",
        "auto: continue an existing run; must: refuse to start a new one; never: refuse to continue one",
        "mesh aside closed",
    )
    init: str | None = key(
        "text or null", None, "URL of a run, or of weights of others, to start from; the optimizer is new", "mesh open"
    )
    init_names: Any = key(
        "mapping or some text or null",
        None,
        "names of tensors at `init` -> names here, or a YAML file of them",
        "mesh open",
    )
    fork: str | None = key(
        "text or null",
        None,
        "URL of a run or checkpoint from which this run goes on: weights, optimizer and position; its model, optim, "
        "data, seed and batch must be the same, other words may differ",
        "mesh open",
    )
    on_spike: str = key(
        ["stop", "skip", "rewind"],
        "stop",
        "if the loss or gradient norm is NaN or jumps: stop; skip that step; or rewind to the newest checkpoint and "
        "skip its samples",
        "aside open",
    )
    stop_after: int | None = key(
        "int >= 1 steps or null",
        None,
        "save, evaluate and stop after this step; the schedule still aims at `steps`",
        "mesh aside open",
    )
    time_limit: Any = key(
        "number > 0 seconds or clock or null",
        None,
        "save and stop in time: seconds, or hours:minutes:seconds, since the start of the command",
        "aside open",
    )
    grace: float = key(
        "number >= 0 seconds", 30, "seconds of the time limit that are reserved for the save", "aside open"
    )
    trust: list[str] = key("list of text", [], "Python packages whose `_target_` may run", "aside typed")
    loop: str = key("text", "dtrain.train.train", "the function each rank runs", "mesh aside closed")
    mesh: sections.Mesh = section(sections.Mesh, "degrees of the mesh axes; null: the strategy decides", "mesh")
    pipeline: sections.Pipeline = section(sections.Pipeline, "how mesh.pp runs")
    tensor: sections.Tensor = section(sections.Tensor, "how mesh.tp runs")
    context: sections.Context = section(sections.Context, "how mesh.cp runs")
    spike: sections.Spike = section(sections.Spike, "what counts as a spike for on_spike", "aside")
    log: sections.Log = section(sections.Log, "", "aside")
    evaluate: sections.Evaluate = section(sections.Evaluate, "")
    stop: sections.Stop = section(sections.Stop, "ends a run that no longer improves", "aside")
    generate: sections.Generate = section(sections.Generate, "", "aside")
    predict: sections.Predict = section(sections.Predict, "", "aside")
    verify: sections.Verify = section(sections.Verify, "", "aside")
    requires: sections.Requires = section(sections.Requires, "checked before the run starts; for recipes", "aside")
    expect: sections.Expect = section(
        sections.Expect,
        "figures of the run as [lowest, highest], null for an open end; for recipes, checked by `dtrain verify`",
        "aside",
    )
    sweep: sections.Sweep = section(sections.Sweep, "", "aside")
    launcher: dict[str, Any] = group("auto", "mesh closed")
    backend: dict[str, Any] = group("auto", "mesh open")
    strategy: dict[str, Any] = group("auto", "mesh open")
    precision: dict[str, Any] = group("auto", "open")
    remat: dict[str, Any] = group("none", "open")
    compile: dict[str, Any] = group("auto", "open")
    model: dict[str, Any] = group("gpt", "open")
    adapter: dict[str, Any] = group("none", "open")
    data: dict[str, Any] = group("text", "open")
    objective: dict[str, Any] = group("auto", "open")
    optim: dict[str, Any] = group("adamw", "open")
    schedule: dict[str, Any] = group("cosine", "open")
    checkpoint: dict[str, Any] = group("sharded", "open")
    logger: dict[str, Any] = group(["console", "tensorboard"], "aside open")
    hook: dict[str, Any] = group("auto", "aside open")
    cluster: dict[str, Any] = group("auto", "aside closed")


@dataclass
class Config(Schema):
    """A composed Schema with the source of every value."""

    choices: dict[str, Any] = field(default_factory=dict)
    """group -> word, or list of words."""
    sources: dict[str, str] = field(default_factory=dict)
    """dotted key -> `command line` or the recipe that set it; absent: the default of its conf file."""
    numbers: dict[str, str] = field(default_factory=dict)
    """dotted key -> a number with a fraction or exponent as it was written, such as 1e3."""
    history: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """dotted key -> (value, source) of every word that was overridden, the oldest first."""
    unresolved: dict[str, str] = field(default_factory=dict)
    """dotted key -> text of a value that reads the environment."""
    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """group -> word -> its arguments: the words that `auto` may choose from."""

    def word(self, group: str) -> str:
        """The word of a group in a message: the `_target_` for a part of the user's own."""
        part = getattr(self, group)
        own = "of yours" if part.get("_target_") == "dtrain.build.given" else part.get("_target_")
        return str(self.choices.get(group) or own)


def _rows() -> Iterator[tuple[str, Field[Any]]]:
    """(dotted key, row) of every plain key."""
    for top in fields(Schema):
        inner = top.default_factory
        if "allowed" in top.metadata:
            yield top.name, top
        elif isinstance(inner, type) and is_dataclass(inner):
            yield from ((f"{top.name}.{row.name}", row) for row in fields(inner))


ROWS: Mapping[str, Field[Any]] = dict(_rows())
ALLOWED: Mapping[str, Any] = {name: row.metadata["allowed"] for name, row in ROWS.items()}
SENTENCES: Mapping[str, str] = {name: row.metadata["sentence"] for name, row in ROWS.items()}
WORDS: Mapping[str, Any] = {top.name: top.metadata["word"] for top in fields(Schema) if "word" in top.metadata}
"""Group -> its default word or words."""


def default(name: str) -> Any:
    """The default of a plain dotted key."""
    value: Any = _defaults()
    for part in name.split("."):
        value = value[part]
    return files.copied(value)


def defaults() -> dict[str, Any]:
    """The plain keys with their defaults, nested as in conf/config.yaml."""
    values: dict[str, Any] = files.copied(_defaults())
    return values


@cache
def _defaults() -> Mapping[str, Any]:
    return {name: value for name, value in asdict(Schema()).items() if name not in GROUPS}


@cache
def aside_rows() -> frozenset[str]:
    """The dotted keys that do not affect results, of sections whose other keys do."""
    return frozenset(name for name, row in ROWS.items() if "." in name and "aside" in row.metadata["scope"].split())


@cache
def of_scope(scope: Scope) -> tuple[str, ...]:
    """The top-level keys and groups of a scope."""
    return tuple(top.name for top in fields(Schema) if scope in top.metadata["scope"].split())
