"""Ray Train's ScalingConfig, RunConfig, FailureConfig and CheckpointConfig:
https://docs.ray.io/en/latest/train/api/api.html

    dtrain import train.py to=mine.yaml

In a Python file, or the same as YAML or JSON. They say how many workers there are and what becomes of checkpoints and
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
"""Their classes' own names for what they take."""


def translate(ledger: Ledger) -> None:
    for tell in (_workers, _place, _kept, _inner):
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
    """The Trainer of Lightning that the workers run, in the same script."""
    if ledger.under("trainer"):
        other = translate_as({"trainer": ledger.tree["trainer"]}, "lightning", ledger.place)
        ledger.take(other)


def _find(ledger: Ledger, name: str) -> str | None:
    """The key of an argument, wherever it stands."""
    return next((key for key in ledger.open() if key.split(".")[-1] == name), None)


def _workers(ledger: Ledger) -> None:
    """A worker is a rank. How many of them are on a node is Ray's business; here nodes x devices says it."""
    key, gpu = _find(ledger, "num_workers"), _find(ledger, "use_gpu")
    if key is not None and not unread(ledger, key, ledger.leaves[key], "devices"):
        value: Any = ledger.leaves[key]
        if isinstance(value, list) and len(value) == 2 and all(isinstance(one, int) and one > 0 for one in value):
            ledger.carry(
                key,
                {"nodes": f"{min(value)}:{max(value)}", "devices": 1},
                "elastic: nodes of one rank each; type nodes and devices as they are",
            )
        elif value == 0:
            ledger.carry(key, {"devices": 1}, "0 means this process")
        else:
            to("devices", count, "on one node; type nodes=2 devices=4 for eight on two")(ledger, key, value)
    if gpu is not None and not isinstance(ledger.leaves[gpu], Code):
        try:
            on = switch(ledger.leaves[gpu])
        except ValueError as error:
            ledger.refuse(gpu, f"Ray takes {error} here. Type backend=gloo for CPUs.")
            return
        if on:
            ledger.skip(gpu, "GPUs where there are any, as here")
        else:
            ledger.carry(gpu, {"backend": "gloo"}, "on CPUs")


def _place(ledger: Ledger) -> None:
    """storage_path and name make the place of a run, which is said on the command line."""
    path, name = _find(ledger, "storage_path"), _find(ledger, "name")
    said = [key for key in (path, name) if key is not None and ledger.leaves[key] is not None]
    if any(isinstance(ledger.leaves[key], Code) for key in said):
        for key in said:
            ledger.refuse(key, "computed in Python, which is not run. Type out=<URL>.")
    elif path in said:
        for key in said:
            ledger.carry(key, {"out": "/".join(str(ledger.leaves[key]).rstrip("/") for key in said)}, command=True)
    elif name in said:
        ledger.carry(str(name), {"out": f"outputs/{ledger.leaves[str(name)]}"}, command=True)


def _kept(ledger: Ledger) -> None:
    """Without a score the newest checkpoints stay, with one the best."""
    keep, score = _find(ledger, "num_to_keep"), _find(ledger, "checkpoint_score_attribute")
    scored = score is not None and ledger.leaves[score] is not None
    order = ledger.leaves.get(_find(ledger, "checkpoint_score_order") or "") or "max"
    if score is not None and scored:
        if order == "min" and str(ledger.leaves[score]) in ("val_loss", "valid_loss", "eval_loss", "loss"):
            ledger.carry(score, {"checkpoint.best": "eval_loss"}, "the held-out loss")
        else:
            ledger.refuse(
                score,
                f"theirs is the {order} of {show(ledger.leaves[score])}. Type checkpoint.best=eval_loss (the lowest), "
                "eval_accuracy (the highest), or eval_<name> of what your objective or a hook gives.",
            )
    if any("checkpoint_config" in key for key in ledger.leaves):
        ledger.imply({"checkpoint.keep": None}, "Ray keeps all unless told otherwise")
    if keep is not None:
        if ledger.leaves[keep] is None:
            ledger.carry(keep, {"checkpoint.keep": None}, "all of them")
        elif scored and ledger.leaves[keep] != 1:
            ledger.refuse(
                keep, "the one best stays, and the newest ones. Type checkpoint.best=eval_loss checkpoint.keep=2."
            )
        else:
            to("checkpoint.keep", count)(ledger, keep, ledger.leaves[keep])


def _restarts(ledger: Ledger, key: str, value: Any) -> None:
    if value == -1:
        ledger.refuse(
            key, "restarts without a step between them end at a number. Type launcher=local launcher.restarts=100."
        )
    else:
        try:
            ledger.carry(
                key,
                {"launcher": "local", "launcher.restarts": whole(value)},
                "in a row, without a new step between them",
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
"""Common name of a loop's argument -> our word."""


def _of_loop(ledger: Ledger, key: str, value: Any) -> None:
    name = key.rpartition(".")[2]
    word = LOOP.get(name)
    ledger.refuse(
        key,
        f"it goes to your own function, which is not read. Type {word or 'the word'}=<value> for what it means there.",
    )
    if word:
        ledger.ask(word, f"{name} {show(value)} of your loop")


RULES: dict[str, Rule] = {
    **every("train_loop_config train_loop_config.**", _of_loop),
    "train_loop_per_worker": unneeded(
        "your own function, which is not read: dtrain has the loop, or takes yours: loop=<yours> trust=[<its package>]"
    ),
    **every("datasets datasets.**", refused("type data=dataset data.dataset._target_=<yours> trust=[<its package>].")),
    **every(
        "torch_config torch_config.** metadata metadata.** dataset_config dataset_config.**",
        unneeded("ranks meet by themselves; samples are shared out by their position"),
    ),
    "resume_from_checkpoint": lacking("a run goes on from its own checkpoint; init=<run of dtrain> takes weights."),
    "max_failures": _restarts,
    **every(
        "fail_fast controller_failure_limit max_preemption_failures relax_collectives_on_preemption preemption_grace_s",
        unneeded("an error of your own code ends the run; killed ranks start again"),
    ),
    **every("num_to_keep checkpoint_score_attribute", refused(ODD)),
    "checkpoint_score_order": unneeded("told with checkpoint_score_attribute"),
    "checkpoint_frequency": chosen({0: unneeded("checkpoint.every says it")}, to("checkpoint.every", count)),
    "checkpoint_at_end": lacking("the last step is always saved.", True),
    **every(
        "resources_per_worker.CPU resources_per_worker.GPU trainer_resources.CPU trainer_resources.GPU",
        unneeded("a rank takes one GPU, or its share of the cores"),
    ),
    **every(
        "resources_per_worker.* trainer_resources.* accelerator_type label_selector.** bundle_label_selector.**",
        refused("which machines are taken is said where they are asked for. Start dtrain there."),
    ),
    **every(
        "placement_strategy elastic_resize_monitor_interval_s",
        unneeded("ranks are numbered by node, outer axes across nodes"),
    ),
    **every("use_tpu topology", lacking("nothing is run on TPUs here. Leave it out.")),
    "storage_filesystem": refused(
        "any fsspec URL is a place: out=s3://bucket/run, with out_options.key=<value> for its client."
    ),
    "storage_path": unneeded("empty"),
    "name": unneeded("empty"),
    "num_workers": to("devices", count),
    "use_gpu": unneeded("GPUs where there are any, as here"),
    **every(
        "sync_config sync_config.** verbose progress_reporter log_to_file local_dir logging_config logging_config.**",
        unneeded("logs are under <out>, of every rank"),
    ),
    **every("stop stop.**", refused("type steps=<number>, or time_limit=3:55:00.")),
    **every(
        "callbacks callbacks.** worker_runtime_env worker_runtime_env.**",
        refused("write a hook: hook.mine._target_=<yours> trust=[<its package>]."),
    ),
    "args.*": refused("given by position. Write its name before it."),
    **every("failure_config checkpoint_config run_config scaling_config", unneeded("empty")),
}
