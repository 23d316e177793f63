"""Translation of Lightning's callbacks: checkpoints, unneeded observers, and callbacks to rewrite as hooks."""

from dtrain.dialect.ledger import Ledger, Rule, count
from dtrain.dialect.rules import every, lacking, refused, to, unneeded
from dtrain.dialect.terms import epochs


def class_of(ledger: Ledger, key: str) -> str:
    """Return the class name of an argument that is an object."""
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
                        name,
                        f"unknown callback {name}. Write a hook: hook.mine._target_=<yours> trust=[<its package>].",
                    ),
                )


def _checkpoint(ledger: Ledger, section: str) -> None:
    """Translate the retention and the interval of checkpoints. save_top_k=1 keeps the newest checkpoint without a
    monitor, and the best with one."""
    top, monitor = ledger.leaves.get(f"{section}.init_args.save_top_k", 1), ledger.get(f"{section}.init_args.monitor")
    ledger.skip(f"{section}.class_path", "covered by its arguments; checkpoints are always saved")
    for key in ledger.under(f"{section}.init_args"):
        name, value = key.rpartition(".")[2], ledger.leaves[key]
        if name == "save_top_k" and top == -1:
            ledger.carry(key, {"checkpoint.keep": None}, "all checkpoints")
        elif name == "save_top_k" and monitor and top != 1:
            ledger.refuse(
                key,
                "dtrain keeps one best checkpoint and the newest ones. Type checkpoint.best=eval_loss "
                "checkpoint.keep=2.",
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
            ledger.carry(key, {"checkpoint.best": "eval_loss"}, "the evaluation loss")
        elif name == "monitor" and value is not None:
            ledger.refuse(
                key,
                "checkpoint.best takes an evaluation metric. Type checkpoint.best=eval_loss, eval_accuracy, or "
                "eval_<name> "
                "for a metric of your objective or hook.",
            )
        elif name == "mode" and value == "max" and monitor:
            ledger.refuse(
                key,
                "a metric defines its own direction: lowest loss, highest accuracy. Type checkpoint.best_is=highest "
                "for a metric that does not.",
            )
        elif name in CHECKPOINT:
            (unneeded("empty") if value is None else CHECKPOINT[name])(ledger, key, value)
        else:
            ledger.refuse(key, "unknown argument of ModelCheckpoint. Leave it out.")


OBSERVERS = {
    "LearningRateMonitor": "metrics.jsonl has the learning rate of every step",
    "TQDMProgressBar": "logger=console draws a bar on a terminal",
    "RichProgressBar": "logger=console draws a bar on a terminal",
    "ModelSummary": "dtrain plan shows the model",
    "RichModelSummary": "dtrain plan shows the model",
    "DeviceStatsMonitor": "metrics.jsonl has all measurements",
    "ThroughputMonitor": "metrics.jsonl has samples_per_second",
    "Timer": "metrics.jsonl has the seconds of every step",
}
INSTEAD = {
    "EarlyStopping": "a run ends at its last step, or at a NaN loss with on_spike=stop. Type "
    "checkpoint.best=eval_loss to keep the best.",
    "StochasticWeightAveraging": "dtrain keeps an exponential average of the weights instead: type ema=0.999.",
    "WeightAveraging": "dtrain keeps an exponential average of the weights instead: type ema=0.999.",
    "EMAWeightAveraging": "type ema=<its decay>.",
    "GradientAccumulationScheduler": "the batch size is constant. Type accumulate=<number>.",
    "BatchSizeFinder": "dtrain plan shows what fits. Type microbatch=<number>.",
    "LearningRateFinder": "type dtrain -m optim.lr=1e-4,3e-4,1e-3 steps=100.",
}
CHECKPOINT: dict[str, Rule] = {
    "every_n_train_steps": to("checkpoint.every", count),
    "every_n_epochs": epochs("checkpoint.every"),
    "train_time_interval": refused("dtrain saves by steps. Type checkpoint.every=<steps>."),
    "save_last": unneeded("the newest checkpoint is always kept"),
    **every(
        "dirpath filename auto_insert_metric_name enable_version_counter verbose save_on_train_epoch_end",
        unneeded("checkpoints are under <out>/checkpoints, named by step"),
    ),
    **every("mode save_top_k", unneeded("the metric defines the best checkpoint, and one of them is kept")),
    "save_weights_only": lacking(
        "checkpoints contain the full state. Type dtrain checkpoint export for the weights only."
    ),
    "save_on_exception": unneeded(
        "killed ranks resume from their last state; checkpoint.memory=1 keeps one of every step"
    ),
    "monitor": unneeded("empty"),
}
