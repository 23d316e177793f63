"""Translation of what TRL adds to Hugging Face's arguments: its precision, and adapters of peft, by LoraConfig or by
the names of a file for `trl sft` and `trl dpo`.
"""

from collections.abc import Mapping

from dtrain.integrations.importers.axolotl_adapter import ALONE, CHANGED, DRAWN, WHOLE, carry_targets
from dtrain.integrations.importers.ledger import Ledger, Rule, count, names, number, positive
from dtrain.integrations.importers.rules import OFF, chosen, given, refused, says, switched, table, to, unneeded

TRL = "TRL"
"""A class of TRL that the file does not name."""
OF_TRL = ("SFTConfig", "DPOConfig", TRL)
SFT = names(
    "assistant_only_loss completion_only_loss dataset_kwargs dataset_text_field eval_packing packing packing_strategy"
)
DPO = names(
    "discopop_tau f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha loss_weights use_weighting "
    "rpo_alpha"
)
"""Arguments that one class alone has."""
MARKS = names("dataset_name dataset_config dataset_train_split use_peft num_generations reward_funcs beta") | SFT | DPO
DEFAULT = "default of the class"


def class_of(ledger: Ledger) -> str:
    """The class of TRL whose arguments a file has that names none; TRL if that is open, empty if it is none of TRL."""
    kinds = [kind for kind, own in (("SFTConfig", SFT), ("DPOConfig", DPO)) if own & {*ledger.tree}]
    return kinds[0] if len(kinds) == 1 else TRL * bool(MARKS & {*ledger.tree})


def precision_section(ledger: Ledger, t: str, kind: str) -> None:
    """Translate mixed precision, which TRL's classes switch on by themselves, and the type of the weights."""
    keys = [f"{of}{name}" for of in (t, "model.", f"{t}model_init_kwargs.") for name in ("dtype", "torch_dtype")]
    half = any(ledger.get(key) in ("bfloat16", "torch.bfloat16") for key in keys)
    adapted = "adapter" in ledger.words or ledger.asks("adapter")
    word = "bf16_true" if half and not adapted else "bf16"
    note = "weights in bf16 too" if word == "bf16_true" else "weights in fp32"
    for key, value in ((f"{t}bf16", word), (f"{t}fp16", "fp16")):
        ledger.settle(given(switched(says({"precision": value}, note), OFF)), key)
    is_off = ledger.get(f"{t}bf16") is False or bool(ledger.get(f"{t}fp16"))
    frozen = unneeded("beside an adapter the frozen weights alone")
    types = {"float32": OFF, "bfloat16": frozen if adapted else says({"precision": word})}
    types |= {f"torch.{name}": rule for name, rule in types.items()}
    other = refused("Type precision=bf16, or precision=bf16_true for weights in bf16 too.", "precision")
    ledger.settle(given(chosen(types, other)), *keys)
    if kind or is_off:
        ledger.imply({"precision": word if kind in OF_TRL and not is_off else "fp32"}, DEFAULT)
    elif "precision" not in ledger.words:
        ledger.ask("precision")


def adapter_section(ledger: Ledger) -> None:
    """Translate peft's LoraConfig, or the arguments of TRL's ModelConfig."""
    if any(key.startswith("LoraConfig.") for key in ledger.leaves):
        for name, rule in OF_PEFT.items():
            ledger.settle(given(rule), f"LoraConfig.{name}", f"LoraConfig.{name}.**")
        _lora(ledger, "LoraConfig.", dict(zip(NAMES, ("r", "target_modules"), strict=True)), (8, 8, 0.0))
    elif ledger.get("use_peft") is True:
        ledger.settle(given(ALONE), "lora_modules_to_save", "lora_target_parameters")
        _lora(ledger, "", {}, (16, 32, 0.05))
        ledger.settle(unneeded("covered by adapter"), "use_peft", "load_in_4bit", "use_bnb_nested_quant")
    elif ledger.get("load_in_4bit") is True or ledger.get("load_in_8bit") is True:
        ledger.settle(refused(WHOLE.format("lora"), "adapter"), "load_in_4bit", "load_in_8bit")
    other = ledger.get("peft.kind")
    ledger.settle(refused(f"{other} is no adapter here. Type adapter=lora, dora or qlora.", "adapter"), "peft.kind")
    for name, rule in OF_MODEL.items():
        ledger.settle(rule, name)


NAMES = ("lora_r", "lora_target_modules")
"""Names of TRL whose names in peft are others."""


def _lora(ledger: Ledger, p: str, named: Mapping[str, str], defaults: tuple[int, int, float]) -> None:
    """Translate an adapter, whose arguments are below the prefix `p`, with `named` for the names of TRL."""
    in_bits = not p and ledger.get("load_in_4bit") is True
    word = "dora" if ledger.get(f"{p}use_dora") is True else "lora"
    nf4 = ledger.get("bnb_4bit_quant_type", "nf4") == "nf4"
    if not p and (ledger.get("load_in_8bit") is True or (in_bits and (word == "dora" or not nf4))):
        ledger.settle(refused(WHOLE.format(word), "adapter"), "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type")
    elif in_bits:
        double = ledger.get("use_bnb_nested_quant") is True
        ledger.settle(says({"adapter": "qlora", "adapter.double": double}, "NF4, as there"), "load_in_4bit")
    on_command = ledger.asks("adapter")  # a quantised base
    ledger.imply({"adapter": word}, "there is an adapter of peft")
    rule = unneeded("covered by adapter") if on_command else says({"adapter": "dora"})
    ledger.settle(switched(rule, OFF), f"{p}use_dora")
    ledger.settle(OFF, *[f"{p}use_rslora"] * (not ledger.get(f"{p}use_rslora")))
    rank, targets_key = (f"{p}{named.get(name, name)}" for name in NAMES)
    if ledger.get(f"{p}use_rslora"):
        why = "dtrain scales by alpha / rank, rsLoRA by alpha / sqrt(rank). Type adapter.alpha=<lora_alpha x sqrt(r)>."
        ledger.settle(refused(why, "adapter.alpha"), f"{p}use_rslora", f"{p}lora_alpha")
    for key, argument, kind in (
        (rank, "rank", count),
        (f"{p}lora_alpha", "alpha", positive),
        (f"{p}lora_dropout", "dropout", number),
    ):
        ledger.settle(given(to(f"adapter.{argument}", kind, command=on_command)), key)
    if not on_command:
        sizes = dict(zip(("adapter.rank", "adapter.alpha", "adapter.dropout"), defaults, strict=True))
        ledger.imply(sizes, f"default of {'peft' if p else 'TRL'}")
    _targets(ledger, p, targets_key, on_command)


def _targets(ledger: Ledger, p: str, key: str, on_command: bool) -> None:
    targets = ledger.get(key)
    plain = (
        isinstance(targets, list) and targets and all(isinstance(each, str) and each.isidentifier() for each in targets)
    )
    if (targets == "all-linear" or plain) and ledger.get(f"{p}layers_to_transform") is None:
        note = "" if plain else "all linear layers of the blocks"
        carry_targets(ledger, key, targets if plain else None, note, on_command)
    else:
        why = "peft chooses the layers by the model or by an expression. Type adapter.targets=[<names of layers>]."
        ledger.settle(refused(why), key, f"{p}layers_to_transform")
        ledger.ask("adapter.targets", "[names of layers]")


OF_PEFT: Mapping[str, Rule] = table(
    {
        "task_type inference_mode base_model_name_or_path revision auto_mapping peft_type": unneeded(
            "model=hf says it"
        ),
        "bias": ALONE,
        "init_lora_weights": DRAWN,
        "modules_to_save trainable_token_indices target_parameters": ALONE,
        "rank_pattern alpha_pattern exclude_modules layer_replication lora_bias loftq_config loftq_config.** "
        "corda_config corda_config.** eva_config eva_config.**": CHANGED,
    }
)
UNUSED = unneeded("only an adapter uses it")
OF_MODEL: Mapping[str, Rule] = table(
    {
        "use_peft load_in_4bit load_in_8bit use_rslora use_dora use_bnb_nested_quant": OFF,
        "lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save lora_target_parameters": UNUSED,
        "lora_task_type": unneeded("model=hf says it"),
        "bnb_4bit_quant_type bnb_4bit_quant_storage": unneeded("the base in 4 bits is NF4"),
    }
)
