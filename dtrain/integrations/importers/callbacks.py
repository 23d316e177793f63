"""Translation of Lightning's callbacks: checkpoints, unneeded observers, and callbacks to rewrite as hooks."""

from typing import Any

from dtrain.integrations.importers.ledger import Code, Ledger, Rule, count
from dtrain.integrations.importers.rules import chosen, given, lacking, refused, says, table, to, unneeded
from dtrain.integrations.importers.terms import epochs


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
    if monitor:
        rules |= {"monitor": _watched("checkpoint.best"), "mode": _direction("checkpoint.best_is")}
    ledger.skip(f"{section}.class_path", "covered by its arguments; checkpoints are always saved")
    unknown = refused("unknown argument of ModelCheckpoint. Leave it out.")
    for key in ledger.under(f"{section}.init_args"):
        rule = rules.get(key.rpartition(".")[2], unknown)
        ledger.settle(unneeded("empty") if ledger.leaves[key] is None and rule is not unknown else rule, key)
    if monitor:
        ledger.imply({"checkpoint.best_is": "lowest"}, "default of ModelCheckpoint")


def _stop(ledger: Ledger, section: str) -> None:
    """Translate early stopping. What it watches is asked for where it cannot be seen, so that no run goes on to its
    last step where Lightning's stops.
    """
    key = f"{section}.init_args"
    ledger.settle(_watched("stop.metric"), f"{key}.monitor", f"{key}.args.0")
    if "stop.metric" not in ledger.words:
        ledger.ask("stop.metric", FIGURE)
    ledger.settle(_direction("stop.best_is"), f"{key}.mode")
    ledger.imply({"stop.best_is": "lowest"}, "default of EarlyStopping")
    ledger.skip(f"{section}.class_path", "covered by its arguments")
    ledger.settle(given(to("stop.patience", count)), f"{key}.patience")
    ledger.settle(given(to("stop.least")), f"{key}.min_delta")
    ledger.imply({"stop.patience": 3}, "default of EarlyStopping")
    ledger.settle(unneeded("a NaN loss is a spike: on_spike"), f"{key}.check_finite")
    ledger.settle(unneeded("evaluations are counted"), f"{key}.check_on_train_epoch_end")
    ledger.settle(
        unneeded("the end of the run says why"), f"{key}.verbose", f"{key}.strict", f"{key}.log_rank_zero_only"
    )
    unknown = lacking("dtrain stops by patience alone. Leave it out.")
    ledger.settle(unknown, f"{key}.**")


def _watched(word: str) -> Rule:
    """Carry the name that a callback watches, which validation_step logs, as an evaluation here calls it."""

    def tell(ledger: Ledger, key: str, value: Any) -> None:
        if isinstance(value, str) and not isinstance(value, Code) and not value.startswith("train"):
            note = "as validation_step logs it, with objective=lightning; eval_loss is what other objectives have"
            ledger.carry(key, {word: f"eval_{value}"}, note)
        else:
            ledger.refuse(key, f"{word} takes a figure of the evaluation. Type {word}=<{FIGURE}>.")
            ledger.ask(word, FIGURE)

    return tell


def _direction(word: str) -> Rule:
    modes = {"min": says({word: "lowest"}), "max": says({word: "highest"})}
    return chosen(modes, refused(f"type {word}=lowest or highest.", word))


FIGURE = "eval_loss, or eval_<a name that validation_step logs>"
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
    "dtrain keeps one best checkpoint and the newest ones. Type checkpoint.best=<a figure> checkpoint.keep=2."
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
        "mode save_top_k": unneeded("checkpoint.best_is defines the best checkpoint, and one of them is kept"),
        "save_weights_only": lacking(
            "checkpoints contain the full state. Type dtrain checkpoint export for the weights only."
        ),
        "save_on_exception": unneeded(
            "killed ranks resume from their last state; checkpoint.memory=1 keeps one of every step"
        ),
        "monitor": unneeded("empty"),
    }
)
