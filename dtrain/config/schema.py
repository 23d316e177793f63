"""The schema: one row per key, with its type, range, default, scope and sentence. Help, validation, conf/config.yaml
(dtrain/config/document.py) and the identity of a run are derived from it.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal

from dtrain.config import files

GROUPS = (
    "launcher", "backend", "strategy", "precision", "remat", "compile", "model", "adapter", "data", "objective",
    "optim", "schedule", "checkpoint", "logger", "hook", "cluster",
)  # fmt: skip
"""Folders of conf/; a run has one word of each (logger and hook take a list of words)."""

NAMED = {"pipeline.schedule": "pipeline"}
"""Key -> the folder of conf/ whose words it takes."""
LISTS = ("logger", "hook")
"""Groups that take a list of words; the arguments of each are under `<group>.<word>`."""

Scope = Literal["mesh", "aside", "typed"]


def key(allowed: Any, default: Any, sentence: str, scope: str = "") -> Any:
    """One row of the schema: allowed values (in the syntax of dtrain/config/constraints.py), default, meaning, and
    scope, any of

        mesh   depends on the machine: another verb that reads the run chooses its own
        aside  does not affect results: a run with another value is the same run
        typed  set by the user only, never by a recipe
    """
    options = {"default_factory": lambda: copy(default)} if isinstance(default, list | dict) else {"default": default}
    return field(**options, metadata={"allowed": allowed, "sentence": sentence, "scope": scope})


def section(kind: type, sentence: str, scope: str = "") -> Any:
    """Rows with a common prefix."""
    return field(default_factory=kind, metadata={"sentence": sentence, "scope": scope})


def group(word: str | list[str], scope: str = "") -> Any:
    """A folder of conf/ with its default `word`."""
    return field(default_factory=dict, metadata={"word": word, "scope": scope})


@dataclass
class Mesh:
    pp: int | None = key("int >= 1 or null", None, "pipeline stages")
    dp_replicate: int | None = key("int >= 1 or null", None, "replicas of the model")
    dp_shard: int | None = key("int >= 1 or null", None, "shards of the state")
    cp: int | None = key("int >= 1 or null", None, "parts of a sequence (context parallelism)")
    tp: int | None = key("int >= 1 or null", None, "parts of a matrix (tensor parallelism)")
    ep: int | None = key(
        "int >= 1 or null",
        None,
        "groups of the ranks of dp_replicate, dp_shard and cp over which experts are split",
    )


@dataclass
class Pipeline:
    schedule: str = key(files.groups()["pipeline"], "1f1b", "order of forwards and backwards")
    stages: int | None = key("int >= 1 or null", None, "stages per rank; null: as many as the schedule needs")
    split: Any = key(
        "blocks or cost or list of ints >= 1",
        "blocks",
        "blocks: equal numbers of blocks; cost: equal work; or the number of blocks of each stage, such as [2,1]",
    )


@dataclass
class Tensor:
    sequence: str = key(
        ["whole", "split"],
        "whole",
        "split: norms and residuals hold a part of the sequence each (sequence parallelism)",
    )
    loss: str = key(["whole", "split"], "whole", "split: logits stay split over the vocabulary")


@dataclass
class Context:
    attention: str = key(
        ["ring", "ulysses"],
        "ring",
        "ring: keys and values travel between ranks; ulysses: ranks exchange sequence for heads",
    )


@dataclass
class Spike:
    sigma: Any = key(
        "number > 0 deviations or auto or null",
        "auto",
        "standard deviations above the mean; null: only NaN and infinity; auto: null for stop, 6 for skip and rewind",
    )
    window: int = key(
        "int >= 8 steps", 128, "steps over which the mean is taken; no spikes are detected before that many steps"
    )


@dataclass
class Log:
    every: int = key("int >= 1 steps", 10, "steps between writes; every step has a row")


@dataclass
class Evaluate:
    every: int = key(
        "int >= 0 steps",
        200,
        "steps between evaluations on held-out data; the last step, or stop_after, always has one; 0: only that",
    )
    samples: int | None = key("int >= 1 samples or null", 256, "held-out samples; null: all of them")


@dataclass
class Generate:
    prompt: str = key("some text", "def ", "text to continue")
    tokens: int = key("int >= 1 tokens", 400, "tokens to generate")
    temperature: float = key("number >= 0", 0.8, "sampling temperature; 0: always the most likely token")
    top_p: float = key("number > 0 and <= 1", 1.0, "draw from the likeliest tokens that together have this probability")


@dataclass
class Verify:
    steps: int = key("int >= 1 steps", 5, "steps that `dtrain verify` compares")


@dataclass
class Sweep:
    out: str | None = key("text or null", None, "folder for the jobs of -m, one subfolder each", "typed")
    space: dict[str, Any] = key("mapping", {}, "in a recipe: key -> values, a list or as typed: {seed: 'range(0,4)'}")
    parallel: Any = key(
        "int >= 1 and <= 1000 or auto", "auto", "jobs at a time; auto: by cores, GPUs and predicted memory"
    )
    workers: int | None = key(
        "int >= 1 and <= 1000 or null", None, "workers that launcher or hydra/launcher starts; null: its n_jobs, or one"
    )
    retries: int = key("int >= 0", 1, "how often a job that was killed or met trouble that may pass is tried again")
    fail: str = key(["go_on", "stop"], "go_on", "when a job has failed: go on with the others, or stop")
    seed: int = key("int >= 0", 0, "of shuffle(...), and of the values that a search draws")
    search: str = key(
        ["grid", "random", "sobol", "tpe", "cmaes", "nsga2"],
        "grid",
        "grid: every combination; random, sobol: values spread over the space; tpe, cmaes: near the best ones so far; "
        "nsga2: the same for two metrics",
    )
    trials: int | None = key(
        "int >= 1 and <= 10000 or null", None, "jobs of a search, or the first ones of a grid; null: all of the grid"
    )
    metric: Any = key(
        "text or list of text or null",
        None,
        "figure that a search improves and `best` compares, such as eval_accuracy; nsga2 takes two; null: "
        "checkpoint.best, eval_loss, or loss if nothing is held out",
    )
    goal: Any = key(
        "text or list of text or null",
        None,
        "min or max: which value of the metric is the best; of two metrics both; null: as the objective states",
    )
    stop: str = key(
        ["none", "halving", "median", "population"],
        "none",
        "halving: of the jobs at a rung the best 1 / factor go on; median: those no worse than the median of earlier "
        "ones; population: the worst 1 / factor take the checkpoints of the best, with words a little changed",
    )
    rung: Any = key(
        "int >= 1 steps or auto",
        "auto",
        "steps of the first rung, where jobs stop and are compared; the next are factor times as long (halving), or as "
        "far apart",
    )
    factor: int = key("int >= 2", 3, "of sweep.stop")
    begin: list[Any] = key(
        "list of mapping", [], "values that a search tries first, such as [{optim.lr:1e-3},{optim.lr:3e-3}]"
    )
    time_limit: Any = key(
        "number > 0 seconds or clock or null",
        None,
        "begin no more jobs after so many seconds, or hours:minutes:seconds, since the start of the command",
    )


@dataclass
class Requires:
    versions: list[str] = key(
        "list of text", [], "packages, such as [torch>=2.11, scikit-learn]; dtrain and python count too"
    )
    gpus: int | None = key("int >= 0 or null", None, "GPUs per node")
    memory: float | None = key("number > 0 GiB or null", None, "GiB per GPU, or of the host if there is none")


@dataclass
class Expect:
    step: int | None = key("int >= 1 steps or null", None, "step at which the figures are checked; null: the last")
    loss: list[Any] | None = key("band or null", None, "of that step's batch")
    accuracy: list[Any] | None = key("band or null", None, "of that step's batch")
    eval_loss: list[Any] | None = key("band or null", None, "of the held-out data")
    eval_accuracy: list[Any] | None = key("band or null", None, "of the held-out data")
    memory: list[Any] | None = key("band or null", None, "peak GiB of the first rank")
    samples_per_second: list[Any] | None = key("band or null", None, "median of the steps")
    tokens_per_second: list[Any] | None = key("band or null", None, "median of the steps")
    hardware: str | None = key("text or null", None, "machine on which memory and speed are checked; null: any")
    small: list[str] = key("list of text", [], "words that make the check cheaper, such as [data.samples=1000]")


@dataclass
class Schema:
    """The top-level keys."""

    nodes: Any = key(
        "int >= 1 and <= 100000 or between",
        1,
        "machines; with launcher=local agents on this host; 1:2 (in YAML '1:2'): one or two, as many as join",
        "mesh",
    )
    devices: Any = key(
        "int >= 1 and <= 1000 or auto", "auto", "processes per node; auto: one per GPU, or one on the CPU", "mesh"
    )
    threads: Any = key(
        "int >= 1 and <= 1000 or auto",
        "auto",
        "CPU threads per rank, which affect the last bits of results; auto: OMP_NUM_THREADS, or the cores of this host "
        "divided by its ranks",
        "mesh",
    )
    steps: int = key("int >= 1 steps", 1000, "optimizer steps of the whole run")
    epochs: float | None = key(
        "number > 0 or null",
        None,
        "passes over the training data, instead of steps; for data that states its length before launch",
    )
    batch: int = key(
        "int >= 1 and <= 1000000000 samples",
        8,
        "samples per optimizer step, of all ranks: microbatch x data-parallel ranks x accumulate",
    )
    microbatch: int | None = key(
        "int >= 1 and <= 1000000000 samples or null", None, "samples per forward on one rank", "mesh"
    )
    accumulate: int | None = key(
        "int >= 1 and <= 1000000000 or null", None, "forwards per optimizer step on one rank", "mesh"
    )
    seed: int = key("int >= 0", 0, "seed of all random numbers")
    clip: float | None = key("number > 0 or null", 1.0, "largest gradient norm; null: no clipping")
    ema: float | None = key(
        "number >= 0 and < 1 or null",
        None,
        "decay per step of an average of the weights, such as 0.999, which is saved and evaluated too; null: none",
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
        "mesh aside",
    )
    init: str | None = key(
        "text or null", None, "URL of a run, or of weights of others, to start from; the optimizer is new", "mesh"
    )
    init_names: Any = key(
        "mapping or some text or null", None, "names of tensors at `init` -> names here, or a YAML file of them", "mesh"
    )
    fork: str | None = key(
        "text or null",
        None,
        "URL of a run or checkpoint from which this run goes on: weights, optimizer and position; its model, optim, "
        "data, seed and batch must be the same, other words may differ",
        "mesh",
    )
    on_spike: str = key(
        ["stop", "skip", "rewind"],
        "stop",
        "if the loss or gradient norm is NaN or jumps: stop; skip that step; or rewind to the newest checkpoint and "
        "skip its samples",
        "aside",
    )
    stop_after: int | None = key(
        "int >= 1 steps or null",
        None,
        "save, evaluate and stop after this step; the schedule still aims at `steps`",
        "mesh aside",
    )
    time_limit: Any = key(
        "number > 0 seconds or clock or null",
        None,
        "save and stop in time: seconds, or hours:minutes:seconds, since the start of the command",
        "aside",
    )
    grace: float = key("number >= 0 seconds", 30, "seconds of the time limit that are reserved for the save", "aside")
    trust: list[str] = key("list of text", [], "Python packages whose `_target_` may run", "aside typed")
    loop: str = key("text", "dtrain.train.train", "the function each rank runs", "mesh aside")
    mesh: Mesh = section(Mesh, "degrees of the mesh axes; null: the strategy decides", "mesh")
    pipeline: Pipeline = section(Pipeline, "how mesh.pp runs")
    tensor: Tensor = section(Tensor, "how mesh.tp runs")
    context: Context = section(Context, "how mesh.cp runs")
    spike: Spike = section(Spike, "what counts as a spike for on_spike", "aside")
    log: Log = section(Log, "", "aside")
    evaluate: Evaluate = section(Evaluate, "")
    generate: Generate = section(Generate, "", "aside")
    verify: Verify = section(Verify, "", "aside")
    requires: Requires = section(Requires, "checked before the run starts; for recipes", "aside")
    expect: Expect = section(
        Expect,
        "figures of the run as [lowest, highest], null for an open end; for recipes, checked by `dtrain verify`",
        "aside",
    )
    sweep: Sweep = section(Sweep, "", "aside")
    launcher: dict[str, Any] = group("auto", "mesh")
    backend: dict[str, Any] = group("auto", "mesh")
    strategy: dict[str, Any] = group("auto", "mesh")
    precision: dict[str, Any] = group("auto")
    remat: dict[str, Any] = group("none")
    compile: dict[str, Any] = group("auto")
    model: dict[str, Any] = group("gpt")
    adapter: dict[str, Any] = group("none")
    data: dict[str, Any] = group("text")
    objective: dict[str, Any] = group("auto")
    optim: dict[str, Any] = group("adamw")
    schedule: dict[str, Any] = group("cosine")
    checkpoint: dict[str, Any] = group("sharded")
    logger: dict[str, Any] = group(["console", "tensorboard"], "aside")
    hook: dict[str, Any] = group("auto", "aside")
    cluster: dict[str, Any] = group("auto", "aside")


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
def of_scope(scope: Scope) -> tuple[str, ...]:
    """The top-level keys and groups of a scope."""
    return tuple(top.name for top in fields(Schema) if scope in top.metadata["scope"].split())
