"""Ray Train's ScalingConfig, RunConfig, FailureConfig and CheckpointConfig:
https://docs.ray.io/en/latest/train/api/api.html

    dtrain import train.py to=mine.yaml

They are read from a Python file, or as YAML or JSON. They configure the workers, the checkpoints and the handling of
failures.
"""

from typing import Any

from dtrain.dialect import translate as translate_as
from dtrain.dialect.ledger import Code, Ledger, Rule, count, names, show, switch, whole
from dtrain.dialect.rules import ODD, chosen, every, lacking, refused, to, unneeded, unread

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


def translate(ledger: Ledger) -> None:
    for tell in (_workers, _output, _retention, _inner):
        tell(ledger)
    of = {
        section: {name: rule for name, rule in RULES.items() if name.split(".")[0] in taken}
        for section, taken in SECTIONS.items()
    }
    inner = {f"run_config.{section}": of[section] for section in ("failure_config", "checkpoint_config")}
    ledger.apply(
        RULES
        | {f"{section}.{name}": rule for section, rules in {**of, **inner}.items() for name, rule in rules.items()}
    )


def _inner(ledger: Ledger) -> None:
    """Translate the Lightning Trainer that the workers run, if it is in the same script."""
    if ledger.under("trainer"):
        other = translate_as({"trainer": ledger.tree["trainer"]}, "lightning", ledger.place)
        ledger.take(other)


def _find(ledger: Ledger, name: str) -> str | None:
    """Return the unrecorded key of an argument, in any section."""
    return next((key for key in ledger.open() if key.split(".")[-1] == name), None)


def _workers(ledger: Ledger) -> None:
    """Translate workers into ranks. Ray places them on nodes; dtrain needs nodes x devices."""
    key, gpu = _find(ledger, "num_workers"), _find(ledger, "use_gpu")
    if key is not None and not unread(ledger, key, ledger.leaves[key], "devices"):
        value: Any = ledger.leaves[key]
        if (
            isinstance(value, list)
            and len(value) == 2
            and all(isinstance(number, int) and number > 0 for number in value)
        ):
            ledger.carry(
                key,
                {"nodes": f"{min(value)}:{max(value)}", "devices": 1},
                "elastic, with one rank per node; type the actual nodes and devices",
            )
        elif value == 0:
            ledger.carry(key, {"devices": 1}, "0 means the current process")
        else:
            to("devices", count, "on one node; type nodes=2 devices=4 for eight on two")(ledger, key, value)
    if gpu is not None and not isinstance(ledger.leaves[gpu], Code):
        try:
            on = switch(ledger.leaves[gpu])
        except ValueError as error:
            ledger.refuse(gpu, f"Ray takes {error} here. Type backend=gloo for CPUs.")
            return
        if on:
            ledger.skip(gpu, "GPUs if available, as here")
        else:
            ledger.carry(gpu, {"backend": "gloo"}, "on CPUs")


def _output(ledger: Ledger) -> None:
    """Join storage_path and name into `out`, which belongs on the command line."""
    path, name = _find(ledger, "storage_path"), _find(ledger, "name")
    given = [key for key in (path, name) if key is not None and ledger.leaves[key] is not None]
    if any(isinstance(ledger.leaves[key], Code) for key in given):
        for key in given:
            ledger.refuse(key, "computed in Python, which dtrain does not run. Type out=<URL>.")
    elif path in given:
        for key in given:
            ledger.carry(key, {"out": "/".join(str(ledger.leaves[key]).rstrip("/") for key in given)}, command=True)
    elif name in given:
        ledger.carry(str(name), {"out": f"outputs/{ledger.leaves[str(name)]}"}, command=True)


def _retention(ledger: Ledger) -> None:
    """Translate the retention: without a score Ray keeps the newest checkpoints, with one the best."""
    keep, score = _find(ledger, "num_to_keep"), _find(ledger, "checkpoint_score_attribute")
    scored = score is not None and ledger.leaves[score] is not None
    order = ledger.leaves.get(_find(ledger, "checkpoint_score_order") or "") or "max"
    if score is not None and scored:
        if order == "min" and str(ledger.leaves[score]) in ("val_loss", "valid_loss", "eval_loss", "loss"):
            ledger.carry(score, {"checkpoint.best": "eval_loss"}, "the evaluation loss")
        else:
            ledger.refuse(
                score,
                f"Ray keeps the {order} of {show(ledger.leaves[score])}. Type checkpoint.best=eval_loss (the lowest), "
                "eval_accuracy (the highest), or eval_<name> for a metric of your objective or hook.",
            )
    if any("checkpoint_config" in key for key in ledger.leaves):
        ledger.imply({"checkpoint.keep": None}, "Ray keeps all by default")
    if keep is not None:
        if ledger.leaves[keep] is None:
            ledger.carry(keep, {"checkpoint.keep": None}, "all checkpoints")
        elif scored and ledger.leaves[keep] != 1:
            ledger.refuse(
                keep,
                "dtrain keeps one best checkpoint and the newest ones. Type checkpoint.best=eval_loss "
                "checkpoint.keep=2.",
            )
        else:
            to("checkpoint.keep", count)(ledger, keep, ledger.leaves[keep])


def _restarts(ledger: Ledger, key: str, value: Any) -> None:
    if value == -1:
        ledger.refuse(key, "dtrain limits the restarts without progress. Type launcher=local launcher.restarts=100.")
    else:
        try:
            ledger.carry(
                key,
                {"launcher": "local", "launcher.restarts": whole(value)},
                "in a row without a new step",
            )
        except (ValueError, TypeError):
            to("launcher.restarts", whole)(ledger, key, value)


LOOP = {
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "batch_size": "microbatch",
    "epochs": "steps",
    "num_epochs": "steps",
    "weight_decay": "optim.weight_decay",
}
"""Common name of a loop's argument -> dtrain's word."""


def _of_loop(ledger: Ledger, key: str, value: Any) -> None:
    name = key.rpartition(".")[2]
    word = LOOP.get(name)
    ledger.refuse(
        key,
        f"dtrain does not read your own function, which takes it. Type {word or 'the equivalent word'}=<value>.",
    )
    if word:
        ledger.ask(word, f"{name}={show(value)} in your loop")


RULES: dict[str, Rule] = {
    **every("train_loop_config train_loop_config.**", _of_loop),
    "train_loop_per_worker": unneeded(
        "dtrain does not read your own function. It runs its own loop, or yours: loop=<yours> trust=[<its package>]"
    ),
    **every("datasets datasets.**", refused("type data=dataset data.dataset._target_=<yours> trust=[<its package>].")),
    **every(
        "torch_config torch_config.** metadata metadata.** dataset_config dataset_config.**",
        unneeded("dtrain sets up the process group itself and distributes samples by index"),
    ),
    "resume_from_checkpoint": lacking(
        "a run resumes from its own checkpoint. Type init=<run of dtrain> to load weights only."
    ),
    "max_failures": _restarts,
    **every(
        "fail_fast controller_failure_limit max_preemption_failures relax_collectives_on_preemption preemption_grace_s",
        unneeded("an error in your code ends the run; killed ranks restart"),
    ),
    **every("num_to_keep checkpoint_score_attribute", refused(ODD)),
    "checkpoint_score_order": unneeded("covered by checkpoint_score_attribute"),
    "checkpoint_frequency": chosen({0: unneeded("checkpoint.every sets the interval")}, to("checkpoint.every", count)),
    "checkpoint_at_end": lacking("the last step is always saved.", True),
    **every(
        "resources_per_worker.CPU resources_per_worker.GPU trainer_resources.CPU trainer_resources.GPU",
        unneeded("a rank uses one GPU, or its share of the cores"),
    ),
    **every(
        "resources_per_worker.* trainer_resources.* accelerator_type label_selector.** bundle_label_selector.**",
        refused("which machines are taken is given where they are asked for. Start dtrain there."),
    ),
    **every(
        "placement_strategy elastic_resize_monitor_interval_s",
        unneeded("ranks are numbered by node; the outer mesh axes span nodes"),
    ),
    **every("use_tpu topology", lacking("dtrain does not run on TPUs. Leave it out.")),
    "storage_filesystem": refused(
        "type any fsspec URL: out=s3://bucket/run, with out_options.key=<value> for its client."
    ),
    "storage_path": unneeded("empty"),
    "name": unneeded("empty"),
    "num_workers": to("devices", count),
    "use_gpu": unneeded("GPUs if available, as here"),
    **every(
        "sync_config sync_config.** verbose progress_reporter log_to_file local_dir logging_config logging_config.**",
        unneeded("every rank's log is under <out>"),
    ),
    **every("stop stop.**", refused("type steps=<number>, or time_limit=3:55:00.")),
    **every(
        "callbacks callbacks.** worker_runtime_env worker_runtime_env.**",
        refused("write a hook: hook.mine._target_=<yours> trust=[<its package>]."),
    ),
    "args.*": refused("positional argument. Write it with its name."),
    **every("failure_config checkpoint_config run_config scaling_config", unneeded("empty")),
}
