"""Translation of the model of Hugging Face's scripts: the call of `from_pretrained`, whose further arguments are
entries of config.json, or the name that TRL's trainers take.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.config.heads import TASKS
from dtrain.integrations.importers.axolotl_adapter import WHOLE
from dtrain.integrations.importers.ledger import Code, Ledger, Rule, show
from dtrain.integrations.importers.rules import lacking, refused, says, switched, table, unneeded

CONFIG = "model.config"
"""The key of another call, of AutoConfig, whose arguments are entries too; here the word for entries."""
HEADS = ("classification", "image_classification")
"""Tasks whose heads checkpoints of language models lack."""
TYPED = "weights in the type of precision; transformers 5 keeps that of the checkpoint"
OF_PRECISION = ("model.dtype", "model.torch_dtype", "model.ignore_mismatched_sizes")
"""Arguments that are no entries of config.json."""
PROBLEMS = {"regression": "regression", "single_label_classification": "classification"}
"""problem_type of transformers -> objective."""


def model_section(ledger: Ledger) -> None:
    """Translate the model: its class and its name, or its name alone, which TRL's trainers take."""
    name, kind = ledger.get("model.name"), str(ledger.get("model.class", "AutoModelForCausalLM"))
    task = TASKS.get(kind.rpartition("For")[2])
    if "model.name" not in ledger.leaves:
        return
    if task is None:
        ledger.settle(refused("Type model=hf model.name=<its name> model.task=<what its head is for>."), "model.**")
        ledger.ask("model", "hf")
        ledger.ask("model.name", name if isinstance(name, str) and not isinstance(name, Code) else "name of the model")
        ledger.ask("model.task", "causal_lm, classification, masked_lm, image_classification or seq2seq")
        return
    if isinstance(name, Code) or not isinstance(name, str):
        ledger.settle(refused(f"{Code.why}. Type model.name=<its name>.", "model.name"), "model.name")
        ledger.imply({"model": "hf", "model.task": task}, f"the class is {kind}")
    else:
        revision = ledger.get("model.revision")
        place = f"{name}@{revision}" if isinstance(revision, str) and not isinstance(revision, Code) else name
        note = "" if {"model.dtype", "model.torch_dtype"} & {*ledger.leaves} else TYPED
        ledger.carry("model.name", {"model": "hf", "model.name": place, "model.task": task}, note)
        ledger.settle(says({"model.name": place}), *["model.revision"] * (place != name))
    ledger.settle(unneeded("covered by model.task"), "model.class")
    quantised = ledger.under("model.quantization_config", "model.load_in_4bit", "model.load_in_8bit")
    if any(ledger.leaves[key] for key in quantised):
        ledger.settle(refused(WHOLE.format("lora")), *quantised)
        ledger.ask("adapter", "lora")
    for argument, rule in LOADING.items():
        ledger.settle(rule, f"model.{argument}", f"model.{argument}.**", f"{CONFIG}.init_args.{argument}")
    _entries(ledger)
    if task in HEADS:
        ledger.settle(switched(says({"model.head": "new"}), KEPT), "model.ignore_mismatched_sizes")
        if "model.head" not in ledger.words:
            ledger.ask("model.head", "new, or kept if the weights have a head for these classes")
    ledger.settle(KEPT, "model.ignore_mismatched_sizes")


def _entries(ledger: Ledger) -> None:
    """Carry the remaining arguments, which transformers takes for entries of config.json."""
    made = str(ledger.get(f"{CONFIG}.class_path", ""))
    keys = [key for key in ledger.under("model") if key not in OF_PRECISION]
    if CONFIG in keys or (made and not made.endswith("Config.from_pretrained")):
        ledger.settle(refused(f"{Code.why}. Type model.config={{<entry of config.json>: <value>}}."), f"{CONFIG}.**")
        ledger.settle(refused(f"{Code.why}. Type model.config={{<entry of config.json>: <value>}}."), CONFIG)
        ledger.ask(CONFIG, "{<entry of config.json>: <value>}")
    ledger.settle(unneeded("covered by model.config"), f"{CONFIG}.class_path", f"{CONFIG}.init_args.args.0")
    _problem(ledger)
    tree = ledger.tree["model"]
    given = {**tree.get("config", {}).get("init_args", {})} if made else {}
    given |= {name: value for name, value in tree.items() if name != "config"}
    keys = [key for key in keys if key in ledger.open()]
    named = [key.removeprefix(f"{CONFIG}.init_args.").removeprefix("model.").split(".")[0] for key in keys]
    entries = {name: given[name] for name in dict.fromkeys(named) if given.get(name) is not None}
    computed = [key for key in keys if isinstance(ledger.leaves[key], Code) or key.endswith(".class_path")]
    if computed or ledger.asks(CONFIG):
        shown = ", ".join(f"{name}: {_hint(value)}" for name, value in entries.items())
        ledger.settle(refused(f"{Code.why}. Type model.config={{{shown}}}."), *keys)
        ledger.ask(CONFIG, f"{{{shown}}}")
    elif entries:
        ledger.settle(says({CONFIG: entries}), *keys)


def _hint(value: Any) -> str:
    """An entry as it is typed; `...` for one that Python computes."""
    return "..." if isinstance(value, Code) or "class_path" in str(value) else show(value)


def _problem(ledger: Ledger) -> None:
    """Translate what transformers chooses the loss by: problem_type, or a single label, which is a number."""
    for key in (f"{CONFIG}.init_args.problem_type", "model.problem_type"):
        kind = ledger.get(key)
        if kind in PROBLEMS:
            ledger.settle(says({"objective": PROBLEMS[kind]}), key)
        ledger.settle(refused("Type objective=classification or regression, or your own.", "objective"), key)
    if 1 in (ledger.get(f"{CONFIG}.init_args.num_labels"), ledger.get("model.num_labels")):
        ledger.imply({"objective": "regression"}, "transformers learns one label as a number")


KEPT = unneeded("weights of another shape are refused before the run, with the words to type")
LOADING: Mapping[str, Rule] = table(
    {
        "attn_implementation device_map low_cpu_mem_usage use_cache cache_dir token use_auth_token force_download "
        "local_files_only use_safetensors output_loading_info max_memory offload_folder from_tf from_flax "
        "finetuning_task return_dict use_flash_attention_2 tp_plan": unneeded("affects speed and loading only"),
        "revision": refused("Type model.name=<name>@<revision>.", "model.name"),
        "subfolder variant state_dict": lacking("Type init=<the weights>.", asked="init"),
        "trust_remote_code": lacking(
            "code of the hub is not run. Install its package and type model._target_=<its class> trust=[<its package>]."
        ),
    }
)
