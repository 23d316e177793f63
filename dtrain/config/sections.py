"""The sections of the schema: rows with a common prefix, such as mesh.tp."""

from dataclasses import dataclass
from typing import Any

from dtrain.config import files
from dtrain.config.row import key


@dataclass
class Mesh:
    pp: int | None = key("int >= 1 or null", None, "pipeline stages", "open")
    dp_replicate: int | None = key("int >= 1 or null", None, "replicas of the model", "open")
    dp_shard: int | None = key("int >= 1 or null", None, "shards of the state", "open")
    cp: int | None = key("int >= 1 or null", None, "parts of a sequence (context parallelism)", "open")
    tp: int | None = key("int >= 1 or null", None, "parts of a matrix (tensor parallelism)", "open")
    ep: int | None = key(
        "int >= 1 or null",
        None,
        "groups of the ranks of dp_replicate, dp_shard and cp over which experts are split",
        "open",
    )


@dataclass
class Pipeline:
    schedule: str = key(files.groups()["pipeline"], "1f1b", "order of forwards and backwards", "open")
    stages: int | None = key("int >= 1 or null", None, "stages per rank; null: as many as the schedule needs", "open")
    split: Any = key(
        "blocks or cost or list of ints >= 1",
        "blocks",
        "blocks: equal numbers of blocks; cost: equal work; or the number of blocks of each stage, such as [2,1]",
        "open",
    )


@dataclass
class Tensor:
    sequence: str = key(
        ["whole", "split"],
        "whole",
        "split: norms and residuals hold a part of the sequence each (sequence parallelism)",
        "open",
    )
    loss: str = key(["whole", "split"], "whole", "split: logits stay split over the vocabulary", "open")


@dataclass
class Context:
    attention: str = key(
        ["ring", "ulysses"],
        "ring",
        "ring: keys and values travel between ranks; ulysses: ranks exchange sequence for heads",
        "open",
    )


@dataclass
class Spike:
    sigma: Any = key(
        "number > 0 deviations or auto or null",
        "auto",
        "standard deviations above the mean; null: only NaN and infinity; auto: null for stop, 6 for skip and rewind",
        "open",
    )
    window: int = key(
        "int >= 8 steps",
        128,
        "steps over which the mean is taken; no spikes are detected before that many steps",
        "open",
    )


@dataclass
class Log:
    every: int = key("int >= 1 steps", 10, "steps between writes; every step has a row", "open")


@dataclass
class Evaluate:
    every: Any = key(
        "int >= 0 steps or epoch",
        200,
        "steps between evaluations on held-out data, epoch: each step that ends a pass over the training data; the "
        "last step, or stop_after, always has one; 0: only that",
        "open",
    )
    samples: int | None = key("int >= 1 samples or null", 256, "held-out samples; null: all of them", "open")
    metrics: list[Any] = key(
        "list of any",
        [],
        "metrics beside those of the objective, such as [top5, f1]; or a class of torchmetrics, "
        "[{_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10}] with trust=[torchmetrics]",
        "open",
    )
    sets: dict[str, Any] = key(
        "mapping",
        {},
        "further held-out data: name -> what is other than in `data`, such as {dev: {path: dev.csv}}, or a word with "
        "its arguments; figures are eval_<name>_loss and so on",
        "open",
    )
    tasks: list[str] = key(
        "list of text",
        [],
        "tasks and groups of lm_eval for `dtrain evaluate as=lm_eval`, such as [hellaswag, arc_easy]",
        "aside closed",
    )
    tasks_path: str | None = key(
        "some text or null",
        None,
        "folder of tasks of your own, as YAML of lm_eval; functions that they name are run",
        "aside closed",
    )
    tokenizer: str | None = key(
        "some text or null",
        None,
        "tokenizer of the tasks: a tokenizer.json, or a folder, URL or hub name; null: that of the data or model",
        "aside open",
    )
    shots: int | None = key(
        "int >= 0 or null", None, "solved examples before each item; null: as its task says", "aside open"
    )
    limit: int | None = key("int >= 1 or null", None, "items of each task; null: all of them", "aside open")
    context: int | None = key(
        "int >= 2 tokens or null",
        None,
        "tokens that the model sees of an item; null: as many as the config of a model of transformers says, else "
        "data.sequence",
        "aside open",
    )
    batch: int = key("int >= 1 samples", 16, "items of a forward of lm_eval's tasks on one rank", "aside open")


@dataclass
class Stop:
    metric: str | None = key(
        "text or null",
        None,
        "figure of the evaluation that must improve, such as eval_loss; null: the run is not stopped",
        "open",
    )
    patience: int = key(
        "int >= 1 evaluations", 5, "evaluations without an improvement after which the run ends", "open"
    )
    least: float = key("number >= 0", 0.0, "an improvement is more than this", "open")
    best_is: str = key(
        ["auto", "lowest", "highest"],
        "auto",
        "lowest or highest, for a figure that only the run knows, such as what a LightningModule logs; auto: as the "
        "objective or metric states",
        "open",
    )


@dataclass
class Generate:
    prompt: str = key("some text", "def ", "text to continue, or the message of a user", "open")
    prompts: str | None = key(
        "some text or null",
        None,
        "file or URL of prompts to be answered instead: one on each line, or JSON lines with prompt or messages",
        "closed",
    )
    to: str | None = key(
        "some text or null", None, "file or URL of the answers as JSON lines; null: the screen", "closed"
    )
    chat: Any = key(
        "bool or auto",
        "auto",
        "true: the chat template renders prompts, and an answer ends with its turn; auto: if the data is a chat",
        "open",
    )
    batch: int = key("int >= 1 prompts", 16, "prompts that are answered at once", "open")
    tokens: int = key("int >= 1 tokens", 400, "tokens to generate, at most", "open")
    temperature: float = key("number >= 0", 0.8, "sampling temperature; 0: always the most likely token", "open")
    top_p: float = key(
        "number > 0 and <= 1", 1.0, "draw from the likeliest tokens that together have this probability", "open"
    )


@dataclass
class Predict:
    to: str | None = key(
        "some text or null",
        None,
        "file for the rows, .jsonl or .parquet, or a folder of parts, with / at its end; any fsspec URL; null: "
        "predictions.jsonl under `out`",
        "closed",
    )
    data: dict[str, Any] = key(
        "mapping",
        {},
        "rows to predict: what is other than in `data`, such as {path: new.csv}, or a word with its arguments, such as "
        "{data: jsonl, path: new.jsonl}; {}: the held-out ones",
        "open",
    )
    scores: str = key(
        ["none", "probabilities", "logits"], "none", "of all classes, as a column beside the predicted one", "open"
    )
    columns: list[str] = key(
        "list of text", [], "columns of the files of rows to write beside the answers, such as [id,text]", "open"
    )
    batch: int = key("int >= 1 samples", 32, "rows of a forward, on any number of ranks", "open")
    part: int = key("int >= 1 samples", 8192, "rows that become durable together", "open")


@dataclass
class Verify:
    steps: int = key("int >= 1 steps", 5, "steps that `dtrain verify` compares", "open")


@dataclass
class Sweep:
    out: str | None = key("text or null", None, "folder for the jobs of -m, one subfolder each", "typed")
    space: dict[str, Any] = key(
        "mapping", {}, "in a recipe: key -> values, a list or as typed: {seed: 'range(0,4)'}", "open"
    )
    parallel: Any = key(
        "int >= 1 and <= 1000 or auto", "auto", "jobs at a time; auto: by cores, GPUs and predicted memory", "open"
    )
    workers: int | None = key(
        "int >= 1 and <= 1000 or null",
        None,
        "workers that launcher or hydra/launcher starts; null: its n_jobs, or one",
        "closed",
    )
    retries: int = key(
        "int >= 0", 1, "how often a job that was killed or met trouble that may pass is tried again", "open"
    )
    fail: str = key(["go_on", "stop"], "go_on", "when a job has failed: go on with the others, or stop", "open")
    seed: int = key("int >= 0", 0, "of shuffle(...), and of the values that a search draws", "open")
    search: str = key(
        ["grid", "random", "sobol", "tpe", "cmaes", "nsga2"],
        "grid",
        "grid: every combination; random, sobol: values spread over the space; tpe, cmaes: near the best ones so far; "
        "nsga2: the same for two metrics",
        "open",
    )
    trials: int | None = key(
        "int >= 1 and <= 10000 or null",
        None,
        "jobs of a search, or the first ones of a grid; null: all of the grid",
        "open",
    )
    metric: Any = key(
        "text or list of text or null",
        None,
        "figure that a search improves and `best` compares, such as eval_accuracy; nsga2 takes two; null: "
        "checkpoint.best, stop.metric, eval_loss, or loss if nothing is held out",
        "open",
    )
    goal: Any = key(
        "text or list of text or null",
        None,
        "min or max: which value of the metric is the best; of two metrics both; null: as the objective states",
        "open",
    )
    stop: str = key(
        ["none", "halving", "median", "population"],
        "none",
        "halving: of the jobs at a rung the best 1 / factor go on; median: those no worse than the median of earlier "
        "ones; population: the worst 1 / factor take the checkpoints of the best, with words a little changed",
        "open",
    )
    rung: Any = key(
        "int >= 1 steps or auto",
        "auto",
        "steps of the first rung, where jobs stop and are compared; the next are factor times as long (halving), or as "
        "far apart",
        "open",
    )
    factor: int = key("int >= 2", 3, "of sweep.stop", "open")
    begin: list[Any] = key(
        "list of mapping", [], "values that a search tries first, such as [{optim.lr:1e-3},{optim.lr:3e-3}]", "open"
    )
    time_limit: Any = key(
        "number > 0 seconds or clock or null",
        None,
        "begin no more jobs after so many seconds, or hours:minutes:seconds, since the start of the command",
        "open",
    )


@dataclass
class Requires:
    versions: list[str] = key(
        "list of text", [], "packages, such as [torch>=2.11, scikit-learn]; dtrain and python count too", "open"
    )
    gpus: int | None = key("int >= 0 or null", None, "GPUs per node", "open")
    memory: float | None = key("number > 0 GiB or null", None, "GiB per GPU, or of the host if there is none", "open")


@dataclass
class Expect:
    step: int | None = key(
        "int >= 1 steps or null", None, "step at which the figures are checked; null: the last", "open"
    )
    loss: list[Any] | None = key("band or null", None, "of that step's batch", "open")
    accuracy: list[Any] | None = key("band or null", None, "of that step's batch", "open")
    eval_loss: list[Any] | None = key("band or null", None, "of the held-out data", "open")
    eval_accuracy: list[Any] | None = key("band or null", None, "of the held-out data", "open")
    memory: list[Any] | None = key("band or null", None, "peak GiB of the first rank", "open")
    samples_per_second: list[Any] | None = key("band or null", None, "median of the steps", "open")
    tokens_per_second: list[Any] | None = key("band or null", None, "median of the steps", "open")
    hardware: str | None = key("text or null", None, "machine on which memory and speed are checked; null: any", "open")
    small: list[str] = key("list of text", [], "words that make the check cheaper, such as [data.samples=1000]", "open")
