"""Ray Train's ScalingConfig, RunConfig, FailureConfig and CheckpointConfig:
https://docs.ray.io/en/latest/train/api/api.html

    dtrain import train.py to=mine.yaml

They are read from a Python file, or as YAML or JSON. They configure the workers, the checkpoints and the handling of
failures.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers import translate as translate_as
from dtrain.integrations.importers.callbacks import ONE_BEST
from dtrain.integrations.importers.ledger import Code, Ledger, count, names, show, whole
from dtrain.integrations.importers.rules import (
    ODD,
    chosen,
    lacking,
    refused,
    says,
    switched,
    table,
    to,
    unneeded,
    unread,
)
from dtrain.integrations.importers.terms import GPUS, NO_TPU, OWN_CHECKPOINT

TITLE = "Ray Train"
MARKS = names(
    "scaling_config run_config failure_config checkpoint_config num_workers use_gpu resources_per_worker "
    "trainer_resources placement_strategy max_failures "
    "num_to_keep checkpoint_score_attribute storage_path storage_filesystem"
)
SILENT = ("model", "data", "objective", "optim", "schedule", "steps", "batch")
SECTIONS = {
    "scaling_config": names(
        "num_workers use_gpu resources_per_worker trainer_resources placement_strategy accelerator_type "
        "label_selector bundle_label_selector use_tpu topology "
        "elastic_resize_monitor_interval_s args"
    ),
    "failure_config": names(
        "max_failures fail_fast controller_failure_limit max_preemption_failures relax_collectives_on_preemption "
        "preemption_grace_s args"
    ),
    "checkpoint_config": names(
        "num_to_keep checkpoint_score_attribute checkpoint_score_order checkpoint_frequency checkpoint_at_end args"
    ),
    "run_config": names(
        "name storage_path storage_filesystem failure_config checkpoint_config sync_config verbose progress_reporter "
        "log_to_file local_dir logging_config stop "
        "callbacks worker_runtime_env args"
    ),
}
"""Argument names of Ray's classes."""
LIGHTNING = ("trainer", "callbacks", "seed_everything", "model", "data")
"""Keys of a Lightning script that workers of Ray run."""


def translate(ledger: Ledger) -> None:
    for tell in (_workers, _output, _retention):
        tell(ledger)
    if ledger.under("trainer"):  # the Lightning Trainer that the workers run, in the same script
        said = {name: ledger.tree[name] for name in LIGHTNING if name in ledger.tree}
        ledger.take(translate_as(said, "lightning", ledger.place))
    rules = dict(RULES)
    for section, arguments in SECTIONS.items():
        for name, rule in RULES.items():
            if name.split(".")[0] in arguments:
                rules[f"{section}.{name}"] = rule
                if section in ("failure_config", "checkpoint_config"):
                    rules[f"run_config.{section}.{name}"] = rule
    ledger.apply(rules)


def _find(ledger: Ledger, name: str) -> str:
    """Return the unrecorded key of an argument, in any section; empty if there is none."""
    return next((key for key in ledger.open() if key.split(".")[-1] == name), "")


def _workers(ledger: Ledger) -> None:
    """Translate workers into ranks. Ray places them on nodes; dtrain needs nodes x devices."""
    key = _find(ledger, "num_workers")
    value: Any = ledger.leaves.get(key)
    if key and not unread(ledger, key, value, "devices"):
        is_range = isinstance(value, list) and len(value) == 2
        if is_range and all(isinstance(number, int) and number > 0 for number in value):
            ledger.carry(
                key,
                {"nodes": f"{min(value)}:{max(value)}", "devices": 1},
                "elastic, with one rank per node; type the actual nodes and devices",
            )
        elif value == 0:
            ledger.carry(key, {"devices": 1}, "0 means the current process")
        else:
            ledger.settle(to("devices", count, "on one node; type nodes=2 devices=4 for eight on two"), key)
    gpu = _find(ledger, "use_gpu")
    if gpu and not isinstance(ledger.leaves[gpu], Code):
        ledger.settle(switched(GPUS, says({"backend": "gloo"}, "on CPUs")), gpu)


def _output(ledger: Ledger) -> None:
    """Join storage_path and name into `out`, which belongs on the command line."""
    path, name = _find(ledger, "storage_path"), _find(ledger, "name")
    given = [key for key in (path, name) if ledger.leaves.get(key) is not None]
    if any(isinstance(ledger.leaves[key], Code) for key in given):
        ledger.settle(refused("computed in Python, which dtrain does not run. Type out=<URL>."), *given)
    elif given:
        places = [str(ledger.leaves[key]).rstrip("/") for key in given]
        out = "/".join(places if path in given else ["outputs", *places])
        for key in given:
            ledger.carry(key, {"out": out}, command=True)


def _retention(ledger: Ledger) -> None:
    """Translate the retention: without a score Ray keeps the newest checkpoints, with one the best."""
    keep, score = _find(ledger, "num_to_keep"), _find(ledger, "checkpoint_score_attribute")
    scored = ledger.leaves.get(score)
    order = ledger.leaves.get(_find(ledger, "checkpoint_score_order")) or "max"
    if order == "min" and scored in ("val_loss", "valid_loss", "eval_loss", "loss"):
        ledger.carry(score, {"checkpoint.best": "eval_loss"}, "the evaluation loss")
    elif scored is not None:
        ledger.refuse(
            score,
            f"Ray keeps the {order} of {show(scored)}. Type checkpoint.best=eval_loss (the lowest), "
            "eval_accuracy (the highest), or eval_<name> for a metric of your objective or hook.",
        )
    if any("checkpoint_config" in key for key in ledger.leaves):
        ledger.imply({"checkpoint.keep": None}, "Ray keeps all by default")
    several = scored is not None and ledger.leaves.get(keep) != 1
    some = ONE_BEST if several else to("checkpoint.keep", count)
    ledger.settle(chosen({None: says({"checkpoint.keep": None}, "all checkpoints")}, some), keep)


def _restarts(ledger: Ledger, key: str, value: Any) -> None:
    if value == -1:
        ledger.refuse(key, "dtrain limits the restarts without progress. Type launcher=local launcher.restarts=100.")
    else:
        to("launcher.restarts", whole, "in a row without a new step", further={"launcher": "local"})(ledger, key, value)


LOOP = {
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "batch_size": "microbatch",
    "epochs": "epochs",
    "num_epochs": "epochs",
    "weight_decay": "optim.weight_decay",
}
"""Common name of a loop's argument -> dtrain's word."""


def _of_loop(ledger: Ledger, key: str, value: Any) -> None:
    name = key.rpartition(".")[2]
    word = LOOP.get(name, "the equivalent word")
    ledger.refuse(key, f"dtrain does not read your own function, which takes it. Type {word}=<value>.")
    if name in LOOP:
        ledger.ask(word, f"{name}={show(value)} in your loop")


KEYS: Mapping[str, Any] = {
    "train_loop_config train_loop_config.**": _of_loop,
    "train_loop_per_worker": unneeded(
        "dtrain does not read your own function. It runs its own loop, or yours: loop=<yours> trust=[<its package>]"
    ),
    "datasets datasets.**": refused("type data=dataset data.dataset._target_=<yours> trust=[<its package>]."),
    "torch_config torch_config.** metadata metadata.** dataset_config dataset_config.**": unneeded(
        "dtrain sets up the process group itself and distributes samples by index"
    ),
    "resume_from_checkpoint": OWN_CHECKPOINT,
    "max_failures": _restarts,
    "fail_fast controller_failure_limit max_preemption_failures relax_collectives_on_preemption "
    "preemption_grace_s": unneeded("an error in your code ends the run; killed ranks restart"),
    "num_to_keep checkpoint_score_attribute": refused(ODD),
    "checkpoint_score_order": unneeded("covered by checkpoint_score_attribute"),
    "checkpoint_frequency": chosen({0: unneeded("checkpoint.every sets the interval")}, to("checkpoint.every", count)),
    "checkpoint_at_end": lacking("the last step is always saved.", True),
    "resources_per_worker.CPU resources_per_worker.GPU trainer_resources.CPU trainer_resources.GPU": unneeded(
        "a rank uses one GPU, or its share of the cores"
    ),
    "resources_per_worker.* trainer_resources.* accelerator_type label_selector.** bundle_label_selector.**": refused(
        "which machines are taken is given where they are asked for. Start dtrain there."
    ),
    "placement_strategy elastic_resize_monitor_interval_s": unneeded(
        "ranks are numbered by node; the outer mesh axes span nodes"
    ),
    "use_tpu topology": NO_TPU,
    "storage_filesystem": refused(
        "type any fsspec URL: out=s3://bucket/run, with out_options.key=<value> for its client."
    ),
    "storage_path name": unneeded("empty"),
    "num_workers": to("devices", count),
    "use_gpu": GPUS,
    "sync_config sync_config.** verbose progress_reporter log_to_file local_dir logging_config "
    "logging_config.**": unneeded("every rank's log is under <out>"),
    "stop stop.**": refused("type steps=<number>, or time_limit=3:55:00."),
    "callbacks callbacks.** worker_runtime_env worker_runtime_env.**": refused(
        "write a hook: hook.mine._target_=<yours> trust=[<its package>]."
    ),
    "args.*": refused("positional argument. Write it with its name."),
    "failure_config checkpoint_config run_config scaling_config": unneeded("empty"),
}
RULES = table(KEYS)
