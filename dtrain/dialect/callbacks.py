"""Callbacks of Lightning's Trainer: checkpoints, observers that are not needed, and hooks to write
instead.
"""

from dtrain.dialect.ledger import Ledger, Rule, count
from dtrain.dialect.rules import every, lacking, refused, to, unneeded
from dtrain.dialect.terms import epochs


def class_of(ledger: Ledger, key: str) -> str:
    """The name of what an argument is an object of."""
    return str(ledger.get(f"{key}.class_path", "")).rpartition(".")[2]


def callbacks(ledger: Ledger, t: str) -> None:
    key = f"{t}callbacks"
    for section in [key, *(f"{key}.{index}" for index in range(50))]:
        name = class_of(ledger, section)
        keys = ledger.under(f"{section}.class_path", f"{section}.init_args")
        if not keys:
            continue
        if name == "ModelCheckpoint":
            _checkpoint(ledger, section)
        elif name in OBSERVERS:
            for other in keys:
                ledger.skip(other, OBSERVERS[name])
        else:
            for other in keys:
                ledger.refuse(
                    other,
                    INSTEAD.get(
                        name, f"there is no {name}. Write a hook: hook.mine._target_=<yours> trust=[<its package>]."
                    ),
                )


def _checkpoint(ledger: Ledger, section: str) -> None:
    """Retention of checkpoints, and their interval. With save_top_k=1 and no monitor the newest one stays, with a
    monitor the best.
    """
    top, monitor = ledger.leaves.get(f"{section}.init_args.save_top_k", 1), ledger.get(f"{section}.init_args.monitor")
    ledger.skip(f"{section}.class_path", "told with its arguments; a run is always saved")
    for key in ledger.under(f"{section}.init_args"):
        name, value = key.rpartition(".")[2], ledger.leaves[key]
        if name == "save_top_k" and top == -1:
            ledger.carry(key, {"checkpoint.keep": None}, "all of them")
        elif name == "save_top_k" and monitor and top != 1:
            ledger.refuse(
                key, "the one best stays, and the newest ones. Type checkpoint.best=eval_loss checkpoint.keep=2."
            )
        elif name == "save_top_k" and not monitor:
            to("checkpoint.keep", count)(ledger, key, value)
        elif name == "monitor" and str(monitor) in (
            "val_loss",
            "valid_loss",
            "validation_loss",
            "val/loss",
            "eval_loss",
        ):
            ledger.carry(key, {"checkpoint.best": "eval_loss"}, "the held-out loss")
        elif name == "monitor" and value is not None:
            ledger.refuse(
                key,
                "a figure of the evaluation is meant. Type checkpoint.best=eval_loss, eval_accuracy, or eval_<name> "
                "of what your objective or a hook gives.",
            )
        elif name == "mode" and value == "max" and monitor:
            ledger.refuse(
                key,
                "who gives a figure says which is the best: the lowest loss, the highest accuracy. Type "
                "checkpoint.best_is=highest where nobody does.",
            )
        elif name in CHECKPOINT:
            (unneeded("empty") if value is None else CHECKPOINT[name])(ledger, key, value)
        else:
            ledger.refuse(key, "an argument of ModelCheckpoint that is not known here. Leave it out.")


OBSERVERS = {
    "LearningRateMonitor": "metrics.jsonl has the learning rate of every step",
    "TQDMProgressBar": "logger=console draws a bar on a terminal",
    "RichProgressBar": "logger=console draws a bar on a terminal",
    "ModelSummary": "dtrain plan tells what is built",
    "RichModelSummary": "dtrain plan tells what is built",
    "DeviceStatsMonitor": "metrics.jsonl has what is measured",
    "ThroughputMonitor": "metrics.jsonl has samples_per_second",
    "Timer": "metrics.jsonl has the seconds of every step",
}
INSTEAD = {
    "EarlyStopping": "a run ends at its steps, or where its loss is no number: on_spike=stop. Type "
    "checkpoint.best=eval_loss to keep the best.",
    "StochasticWeightAveraging": "another average of the weights is kept beside them: type ema=0.999.",
    "WeightAveraging": "another average of the weights is kept beside them: type ema=0.999.",
    "EMAWeightAveraging": "type ema=<its decay>.",
    "GradientAccumulationScheduler": "the batch is the same in every step. Type accumulate=<number>.",
    "BatchSizeFinder": "dtrain plan tells what fits. Type microbatch=<number>.",
    "LearningRateFinder": "type dtrain -m optim.lr=1e-4,3e-4,1e-3 steps=100.",
}
CHECKPOINT: dict[str, Rule] = {
    "every_n_train_steps": to("checkpoint.every", count),
    "every_n_epochs": epochs("checkpoint.every"),
    "train_time_interval": refused("saves are counted in steps. Type checkpoint.every=<steps>."),
    "save_last": unneeded("the newest one always stays"),
    **every(
        "dirpath filename auto_insert_metric_name enable_version_counter verbose save_on_train_epoch_end",
        unneeded("checkpoints are under <out>/checkpoints, named by step"),
    ),
    **every("mode save_top_k", unneeded("the objective says what is the best, and one of them stays")),
    "save_weights_only": lacking("a checkpoint is whole; dtrain checkpoint export writes weights alone."),
    "save_on_exception": unneeded(
        "killed ranks go on from their last state: checkpoint.memory=1 keeps one of every step"
    ),
    "monitor": unneeded("empty"),
}
