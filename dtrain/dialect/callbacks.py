"""Translation of Lightning's callbacks: checkpoints, unneeded observers, and callbacks to rewrite as hooks."""

from dtrain.dialect.ledger import Ledger, count
from dtrain.dialect.rules import given, lacking, refused, says, table, to, unneeded
from dtrain.dialect.terms import epochs


def class_of(ledger: Ledger, key: str) -> str:
    """Return the class name of an argument that is an object."""
    return str(ledger.get(f"{key}.class_path", "")).rpartition(".")[2]


def callbacks(ledger: Ledger, t: str) -> None:
    for section in sections(ledger, f"{t}callbacks"):
        name = class_of(ledger, section)
        if name == "ModelCheckpoint":
            _checkpoint(ledger, section)
            continue
        if name == "EarlyStopping":
            _stop(ledger, section)
            continue
        unknown = f"unknown callback {name}. Write a hook: hook.mine._target_=<yours> trust=[<its package>]."
        rule = unneeded(OBSERVERS[name]) if name in OBSERVERS else refused(INSTEAD.get(name, unknown))
        ledger.settle(rule, f"{section}.class_path", f"{section}.init_args", f"{section}.init_args.**")


def sections(ledger: Ledger, key: str) -> list[str]:
    """Return the keys of the objects at `key`: one, or a list of them."""
    paths = [path.removesuffix(".class_path") for path in ledger.under(key) if path.endswith(".class_path")]
    return [path for path in paths if path == key or path.rpartition(".")[0] == key]


def _checkpoint(ledger: Ledger, section: str) -> None:
    """Translate the retention and the interval of checkpoints. save_top_k=1 keeps the newest checkpoint without a
    monitor, and the best with one."""
    top, monitor = ledger.leaves.get(f"{section}.init_args.save_top_k", 1), ledger.get(f"{section}.init_args.monitor")
    rules = dict(CHECKPOINT)
    if top == -1:
        rules["save_top_k"] = says({"checkpoint.keep": None}, "all checkpoints")
    elif not monitor:
        rules["save_top_k"] = to("checkpoint.keep", count)
    elif top != 1:
        rules["save_top_k"] = ONE_BEST
    if monitor in LOSSES:
        rules["monitor"] = says({"checkpoint.best": "eval_loss"}, "the evaluation loss")
    if monitor and ledger.get(f"{section}.init_args.mode") == "max":
        rules["mode"] = refused(
            "a metric defines its own direction: lowest loss, highest accuracy. Type checkpoint.best_is=highest "
            "for a metric that does not."
        )
    ledger.skip(f"{section}.class_path", "covered by its arguments; checkpoints are always saved")
    unknown = refused("unknown argument of ModelCheckpoint. Leave it out.")
    for key in ledger.under(f"{section}.init_args"):
        rule = rules.get(key.rpartition(".")[2], unknown)
        ledger.settle(unneeded("empty") if ledger.leaves[key] is None and rule is not unknown else rule, key)


def _stop(ledger: Ledger, section: str) -> None:
    """Translate early stopping at the evaluation loss, of which the lowest is the best."""
    key = f"{section}.init_args"
    monitor, mode = ledger.get(f"{key}.monitor", ledger.get(f"{key}.args.0")), ledger.get(f"{key}.mode", "min")
    if monitor not in LOSSES or mode != "min":
        why = "type stop.metric=eval_loss, eval_accuracy or eval_<name>, and stop.patience=<evaluations>."
        ledger.settle(refused(why), f"{section}.class_path", key, f"{key}.**")
        return
    ledger.settle(says({"stop.metric": "eval_loss"}, "the evaluation loss"), f"{key}.monitor", f"{key}.args.0")
    ledger.skip(f"{section}.class_path", "covered by its arguments")
    ledger.settle(given(to("stop.patience", count)), f"{key}.patience")
    ledger.settle(given(to("stop.least")), f"{key}.min_delta")
    ledger.imply({"stop.patience": 3}, "default of EarlyStopping")
    ledger.settle(unneeded("of the loss the lowest is the best"), f"{key}.mode")
    ledger.settle(unneeded("a NaN loss is a spike: on_spike"), f"{key}.check_finite")
    ledger.settle(unneeded("evaluations are counted"), f"{key}.check_on_train_epoch_end")
    ledger.settle(
        unneeded("the end of the run says why"), f"{key}.verbose", f"{key}.strict", f"{key}.log_rank_zero_only"
    )
    unknown = lacking("dtrain stops by patience alone. Leave it out.")
    ledger.settle(unknown, f"{key}.**")


LOSSES = ("val_loss", "valid_loss", "validation_loss", "val/loss", "eval_loss")
"""Names that people give to the evaluation loss."""
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
    "StochasticWeightAveraging": "dtrain keeps an exponential average of the weights instead: type ema=0.999.",
    "WeightAveraging": "dtrain keeps an exponential average of the weights instead: type ema=0.999.",
    "EMAWeightAveraging": "type ema=<its decay>.",
    "GradientAccumulationScheduler": "the batch size is constant. Type accumulate=<number>.",
    "BatchSizeFinder": "dtrain plan shows what fits. Type microbatch=<number>.",
    "LearningRateFinder": "type dtrain -m optim.lr=1e-4,3e-4,1e-3 steps=100.",
}
ONE_BEST = refused(
    "dtrain keeps one best checkpoint and the newest ones. Type checkpoint.best=eval_loss checkpoint.keep=2."
)
CHECKPOINT = table(
    {
        "every_n_train_steps": to("checkpoint.every", count),
        "every_n_epochs": epochs("checkpoint.every"),
        "train_time_interval": refused("dtrain saves by steps. Type checkpoint.every=<steps>."),
        "save_last": unneeded("the newest checkpoint is always kept"),
        "dirpath filename auto_insert_metric_name enable_version_counter verbose save_on_train_epoch_end": unneeded(
            "checkpoints are under <out>/checkpoints, named by step"
        ),
        "mode save_top_k": unneeded("the metric defines the best checkpoint, and one of them is kept"),
        "save_weights_only": lacking(
            "checkpoints contain the full state. Type dtrain checkpoint export for the weights only."
        ),
        "save_on_exception": unneeded(
            "killed ranks resume from their last state; checkpoint.memory=1 keeps one of every step"
        ),
        "monitor": refused(
            "checkpoint.best takes an evaluation metric. Type checkpoint.best=eval_loss, eval_accuracy, or "
            "eval_<name> for a metric of your objective or hook."
        ),
    }
)
