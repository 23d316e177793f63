"""Translation of axolotl's LoRA section, whose names are those of peft."""

import math
from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers.ledger import Ledger, Rule, count, number, positive, show
from dtrain.integrations.importers.rules import chosen, given, lacking, refused, table, to, unneeded

KINDS = ("lora", "qlora")
QUANTISED = ("load_in_4bit", "load_in_8bit", "gptq", "peft.weight_dtype")
WHOLE = (
    "dtrain quantises the base of adapter=qlora alone, to NF4, on ranks that hold all of it. Type adapter={} to train "
    "the adapter beside whole weights, or adapter=qlora strategy=ddp."
)
UNUSED = unneeded("only an adapter uses it")
"""axolotl ignores these keys where `adapter` is empty."""


def adapter_section(ledger: Ledger) -> None:
    """Without `adapter` all weights are trained. An adapter that dtrain does not have as it stands is asked for, with
    its arguments on the command line.
    """
    kind = ledger.get("adapter")
    if not kind and not ledger.get("lora_model_dir"):
        return
    for name, rule in OPTIONS.items():
        ledger.settle(rule, name, f"{name}.**")
    word = "dora" if ledger.get("peft_use_dora") else "lora"
    why = _obstacle(ledger, kind, word)
    if not why and ledger.asks("adapter"):
        why = f"other keys add to it what dtrain's does not have. Type adapter={word if kind == 'lora' else kind}."
    if why:
        there = (key for key in ("adapter", "lora_model_dir", *QUANTISED) if ledger.get(key))
        ledger.settle(refused(why), *there)
        ledger.ask("adapter", "lora or dora" if kind not in KINDS else word)
    elif kind == "qlora":
        ledger.carry("adapter", {"adapter": "qlora", "adapter.double": True}, "NF4 with scales in 8 bits, as there")
        ledger.settle(unneeded("covered by adapter"), "load_in_4bit")
    else:
        ledger.carry("adapter", {"adapter": word})
    ledger.settle(unneeded("empty"), "adapter", "lora_model_dir")
    _sizes(ledger, bool(why))
    _targets(ledger, bool(why))
    ledger.settle(unneeded("covered by adapter"), "peft_use_dora")


def _obstacle(ledger: Ledger, kind: Any, word: str) -> str:
    """Return why dtrain cannot begin with this adapter; empty if it can."""
    if ledger.get("lora_model_dir"):
        return (
            f"dtrain does not train an adapter of peft on. Merge it into base_model and type adapter={word}, or type "
            f"init=<a dtrain run with adapter={word}>."
        )
    if kind not in KINDS:
        return f"dtrain has no adapter {kind}. Type adapter=lora or adapter=dora."
    sharded = any(ledger.get(key) for key in ("fsdp", "deepspeed")) or ledger.under("fsdp_config")
    plain = kind == "qlora" and word == "lora" and not sharded and not ledger.under("bnb_config_kwargs")
    if not plain and (kind == "qlora" or ledger.get("load_in_4bit")):
        return WHOLE.format(word)
    if any(ledger.get(key) for key in QUANTISED if key != "load_in_4bit"):
        return WHOLE.format(word)
    return ""


def _sizes(ledger: Ledger, on_command: bool) -> None:
    rank, alpha = ledger.get("lora_r"), ledger.get("lora_alpha")
    if ledger.get("peft_use_rslora"):
        scaled = "lora_alpha x sqrt(lora_r)"
        if isinstance(rank, int) and isinstance(alpha, int | float) and rank > 0:
            scaled = f"{alpha * math.sqrt(rank):.12g}"
        why = f"dtrain scales by alpha / rank, rsLoRA by alpha / sqrt(rank). Type adapter.alpha={scaled} for the same."
        ledger.settle(refused(why), "peft_use_rslora", "lora_alpha")
        ledger.ask("adapter.alpha", scaled)
    ledger.settle(given(to("adapter.rank", count, command=on_command)), "lora_r")
    ledger.settle(given(to("adapter.alpha", positive, command=on_command)), "lora_alpha")
    ledger.settle(given(to("adapter.dropout", number, command=on_command)), "lora_dropout")
    for key, word in (("lora_r", "adapter.rank"), ("lora_alpha", "adapter.alpha")):
        if ledger.get(key) is None:
            ledger.ask(word)


def _targets(ledger: Ledger, on_command: bool) -> None:
    """Translate the layers that get an adapter. peft matches names of a list at the end of a layer's name, as here."""
    named, layers = ledger.get("lora_target_modules"), ledger.get("peft_layers_to_transform")
    every, why = bool(ledger.get("lora_target_linear")) or named == "all-linear", ""
    plain = isinstance(named, list) and all(isinstance(each, str) and each.isidentifier() for each in named)
    if layers not in (None, []):
        why = "Type adapter.targets=[layers.<number>.*.<name>] for the layers of these numbers."
    elif not every and isinstance(named, str):
        why = "a regular expression, of which dtrain takes * alone. Type adapter.targets=[<patterns of names>]."
    elif every and plain and {"lm_head", "embed_tokens"} & set(named):
        why = "adapter.targets=null are the layers of the blocks. Type adapter.targets=[<all names>] for more."
    elif not every and not (plain and named):
        why = "peft chooses the layers by the model. Type adapter.targets=[<names of layers>]."
    if why:
        ledger.settle(refused(why), "lora_target_modules", "lora_target_linear", "peft_layers_to_transform")
        ledger.ask("adapter.targets", "[patterns of names of layers]")
        return
    note = "all linear layers of the blocks" if every else ""
    for key in ("lora_target_linear", "lora_target_modules"):
        if key in ledger.open():
            if bool(ledger.get(key)) and (every or key == "lora_target_modules"):
                carry_targets(ledger, key, None if every else named, note, on_command)
            else:
                ledger.skip(key, "off, as here")


def carry_targets(ledger: Ledger, key: str, targets: list[str] | None, note: str, on_command: bool) -> None:
    ledger.carry(key, {"adapter.targets": show(targets) if on_command else targets}, note, command=on_command)


def _faster(ledger: Ledger, key: str, value: Any) -> None:
    """Translate LoRA+: B has a rate of its own, a multiple of the others'."""
    rate = ledger.get("learning_rate")
    if value and all(isinstance(each, int | float) and not isinstance(each, bool) for each in (rate, value)):
        ledger.carry(key, {"optim.lr_of": {"lora_B": float(f"{rate * value:.12g}")}}, "learning_rate x the ratio")
    else:
        lacking("Type optim.lr_of={lora_B: <optim.lr x the ratio>}.", asked="optim.lr_of")(ledger, key, value)


REFUSED = lacking("the adapter does not have it. Leave it out.")
CHANGED = lacking("the adapter does not have it. Leave it out, and type adapter=<the word>.", asked="adapter")
ALONE = lacking(
    "beside an adapter no other parameter is trained. Leave it out and type adapter=<the word>, or adapter=none to "
    "train all.",
    asked="adapter",
)
DRAWN = chosen(
    {True: unneeded("A is drawn as by peft and B is zero")},
    refused("A is drawn as by kaiming_uniform_ and B is zero. Leave it out, and type adapter=<the word>.", "adapter"),
)
OPTIONS: Mapping[str, Rule] = table(
    {
        "lora_modules_to_save peft_trainable_token_indices lora_target_parameters": ALONE,
        "peft_init_lora_weights": given(DRAWN),
        "loraplus_lr_ratio": _faster,
        "loraplus_lr_embedding peft_autocast_adapter_dtype lora_on_cpu lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "lora_embedding_kernel qlora_sharded_model_loading merge_lora merge_method peft_layers_pattern "
        "bnb_config_kwargs": unneeded(
            "affects speed and loading only; dtrain checkpoint export adapter=merged writes one model"
        ),
        "lora_rank_pattern lora_alpha_pattern peft_layer_replication lora_exclude_modules relora loftq_config": CHANGED,
        "lora_fan_in_fan_out": REFUSED,
    }
)
