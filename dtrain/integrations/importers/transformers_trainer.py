"""Translation of the arguments of Hugging Face's Trainer, and TRL's, beside those of their TrainingArguments: what code
gives a run. Early stopping becomes `stop`; for everything else the word to type is named.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.config import files
from dtrain.integrations.importers.callbacks import class_of, sections
from dtrain.integrations.importers.ledger import Code, Ledger, Rule, count, show
from dtrain.integrations.importers.rules import given, lacking, refused, says, switched, table, to, unneeded
from dtrain.integrations.importers.terms import CHANGES_LOSS, unknown_optimizer

SECTION = "Trainer"
"""The key of these arguments in the tree."""
OF_TRL = ("SFTConfig", "DPOConfig")
"""Arguments of trainers that load the tokenizer beside the model."""
STOPPING = "EarlyStoppingCallback"
PLACES = ("early_stopping_patience", "early_stopping_threshold")
"""Its arguments in their order."""


def own_optimizer(ledger: Ledger, t: str) -> tuple[bool, bool]:
    """Whether code gives the optimizer, and the schedule: then the arguments for them do not count, and both are asked
    for.
    """
    keys = [key for name in ("optimizers", "optimizer_cls_and_kwargs") for key in ledger.under(f"{SECTION}.{name}")]
    places = [place for key in keys for place in _places(key, ledger.leaves[key])]
    both = bool(places), any(place > 0 for place in places)
    for is_own, names in zip(both, (OF_OPTIMIZER, OF_SCHEDULE), strict=True):
        if is_own:
            ledger.settle(unneeded("the Trainer is given others by code"), *(f"{t}{name}" for name in names))
    if both[1]:
        ledger.ask("schedule")
    if any(both):
        made = [ledger.leaves[key] for key in keys if key.endswith("class_path")]
        unknown_optimizer(ledger, str(made[0]) if made else Code("code"), {})
        why = "made by code, in place of what the arguments say. Type optim=<word> optim.lr=<rate>"
        ledger.settle(refused(f"{why} schedule=<word>." if both[1] else f"{why}."), *keys)
    return both


def _places(key: str, value: Any) -> list[int]:
    """Which of the optimizer (0) and the schedule (1) a key gives."""
    if isinstance(value, list) and key.endswith(".optimizers"):
        return [place for place, each in enumerate(value) if each is not None]
    _, name, *inside = key.split(".")
    if value is None or name != "optimizers":
        return [0] * (value is not None)
    return [int(inside[0])] if inside and inside[0].isdigit() else [0, 1]


def trainer_section(ledger: Ledger, t: str) -> None:
    """Translate them; `t` is the prefix of the arguments of TrainingArguments."""
    for section in sections(ledger, f"{SECTION}.callbacks"):
        name = class_of(ledger, section)
        if name == STOPPING:
            _stop(ledger, section, t)
            continue
        unknown = refused(f"{name} is not run. Write a hook: hook.mine._target_=<yours> trust=[<its package>].")
        ledger.settle(unknown, f"{section}.class_path", f"{section}.init_args", f"{section}.init_args.**")
    ledger.settle(CALLBACKS, f"{SECTION}.callbacks", f"{SECTION}.callbacks.**")
    if "model" in ledger.words:
        ledger.settle(unneeded("the call of from_pretrained says it"), f"{SECTION}.model")
    _collator(ledger)
    _tokenizer(ledger, loads=t.startswith(OF_TRL))
    metrics = ledger.words.get("evaluate.metrics")
    ledger.settle(unneeded(f"evaluate.metrics={show(metrics)} is measured"), *METRICS * bool(metrics))
    for name, rule in RULES.items():
        ledger.settle(given(rule), f"{SECTION}.{name}", f"{SECTION}.{name}.**")


def _stop(ledger: Ledger, section: str, t: str) -> None:
    """Translate early stopping, which looks at `metric_for_best_model`, the evaluation loss by default."""
    key = f"{section}.init_args"
    name = str(ledger.get(f"{t}metric_for_best_model", "loss")).removeprefix("eval_")
    is_listed = name in files.groups()["metric"]
    if name != "loss" and not is_listed:
        why = "Type stop.metric=eval_loss, eval_accuracy or eval_<name>, and stop.patience=<evaluations>."
        ledger.settle(refused(why), f"{section}.class_path", key, f"{key}.**")
        return
    words = {"stop.metric": f"eval_{name}", **({"evaluate.metrics": [name]} if is_listed else {})}
    ledger.settle(says(words, "metric_for_best_model"), f"{section}.class_path")
    for place, (name, rule) in enumerate(zip(PLACES, (to("stop.patience", count), to("stop.least")), strict=True)):
        ledger.settle(given(rule), f"{key}.{name}", f"{key}.args.{place}")
    ledger.imply({"stop.patience": 1}, f"default of {STOPPING}")
    ledger.settle(unneeded("empty"), key)
    ledger.settle(lacking("dtrain stops by patience alone. Leave it out."), f"{key}.**")


def _collator(ledger: Ledger) -> None:
    """Translate how rows are put together, which is padding for most."""
    key = f"{SECTION}.data_collator"
    name = class_of(ledger, key) or str(ledger.get(key, "")).rpartition(".")[2]
    masks = ledger.get(f"{key}.init_args.mlm", ledger.get(f"{key}.init_args.args.1", True))
    if name in PADDING:
        ledger.settle(unneeded(PADDING[name]), key, f"{key}.**")
    elif name == "DataCollatorForLanguageModeling" and isinstance(masks, bool):
        word = "masked" if masks else "next_token"
        ledger.settle(says({"objective": word}), f"{key}.class_path", f"{key}.init_args.mlm")
        part = to("objective.part") if masks else unneeded("mlm is off")
        ledger.settle(part, f"{key}.init_args.mlm_probability")
        ledger.settle(unneeded("rows are padded with the tokenizer of data.tokenizer"), f"{key}.init_args.**")


def _tokenizer(ledger: Ledger, *, loads: bool) -> None:
    """Name the tokenizer of the model where the Trainer is given one, or `loads` it by the name of the model."""
    name, keys = ledger.words.get("model.name"), ledger.under(f"{SECTION}.processing_class", f"{SECTION}.tokenizer")
    if (keys or loads) and name and ledger.words.get("model.task") != "image_classification":
        ledger.command.setdefault("data.tokenizer", name)


PADDING = {
    **dict.fromkeys(
        ("DataCollatorWithPadding", "DataCollatorForSeq2Seq"), "data.tokenizer pads what it makes tokens of"
    ),
    **dict.fromkeys(("DefaultDataCollator", "default_data_collator"), "rows are put together alike"),
}
"""Collator that dtrain needs no other for -> why."""
METRICS = (f"{SECTION}.compute_metrics", f"{SECTION}.compute_metrics.**")
WITH = "together with data=chat, which you must type"
SEQUENCE = given(to("data.sequence", count, WITH, command=True))
PROMPTS = refused("data.sequence is the most tokens of a whole row. Leave it out.")
PACKING = switched(to("data.packing", lambda value: "pack", WITH, command=True), unneeded("off, as here"))
OF_OPTIMIZER = ("optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
OF_SCHEDULE = ("lr_scheduler_type", "warmup_steps", "warmup_ratio")
"""Arguments of TrainingArguments that code replaces."""
CALLBACKS = refused("callbacks are not run. Write a hook: hook.mine._target_=<yours> trust=[<its package>].")
RULES: Mapping[str, Rule] = table(
    {
        "train_dataset": unneeded("made by code; name the rows by data.path on the command line"),
        "eval_dataset": unneeded(
            "held-out rows are data.holdout; for these type data.holdout=0 evaluate.sets={dev: {path: <files>}}, whose "
            "figures are eval_dev_loss and so on: checkpoint.best=eval_dev_loss"
        ),
        "processing_class tokenizer": unneeded("data.tokenizer names it"),
        "class": refused(
            "its methods are not run, and its loss is its own. Type objective=<word>, objective._target_=<your loss> "
            "trust=[<its package>], or a hook.",
            "objective",
        ),
        "model model_init": refused(
            "Type model=hf model.name=<its name>, or model._target_=<yours> trust=[<its package>].", "model"
        ),
        "data_collator": refused(
            "rows are padded by data.pad, and data=chat makes its own batches. Type data.collate._target_=<yours> "
            "trust=[<its package>] for another way."
        ),
        "compute_loss_func": refused("Type objective._target_=<yours> trust=[<its package>].", "objective"),
        "compute_metrics": refused("Type evaluate.metrics=[<a metric>].", "evaluate.metrics"),
        "preprocess_logits_for_metrics": unneeded("an option of compute_metrics"),
        "peft_config": refused("Type adapter=lora adapter.rank=<rank> adapter.alpha=<alpha>."),
        "max_seq_length max_length": SEQUENCE,
        "max_prompt_length max_target_length max_completion_length": PROMPTS,
        "neftune_noise_alpha": CHANGES_LOSS,
        "truncation_mode": refused("a longer row loses its end. Leave it out."),
        "label_pad_token_id padding_value is_encoder_decoder generate_during_eval precompute_ref_log_probs "
        "dataset_num_proc dataset_batch_size num_of_sequences chars_per_token eval_packing": unneeded(
            "an option of the preparation of data"
        ),
        "packing": PACKING,
        "dataset_text_field dataset_kwargs": refused("Type data=text data.path=<files> data.column=<it>."),
        "formatting_func": refused("Type data=chat data.path=<rows>, or write the text into the rows."),
        "ref_model": refused(
            "objective=dpo compares with the weights that the run begins with. Leave it out."
        ),
        "optimizers optimizer_cls_and_kwargs": unneeded("the arguments give the optimizer and its schedule"),
        "args": unneeded("its arguments are listed"),
    }
)  # fmt: skip
