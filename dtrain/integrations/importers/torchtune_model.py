"""Translation of torchtune's models, LoRA builders and losses.

A builder makes the model of a checkpoint of Hugging Face, whose folder the checkpointer names: model=hf reads both.
"""

import re

from dtrain.integrations.importers.axolotl_adapter import WHOLE, carry_targets
from dtrain.integrations.importers.ledger import Ledger, count, names, number, positive
from dtrain.integrations.importers.rules import given, lacking, refused, says, switched, to, unneeded
from dtrain.secrets import screen

COMPONENT = "_component_"
LOSSES = names(
    "torch.nn.CrossEntropyLoss torchtune.modules.loss.CEWithChunkedOutputLoss "
    "torchtune.modules.loss.LinearCrossEntropyLoss "
    "torchtune.modules.loss.SFTLoss torchtune.modules.loss.cross_entropy_loss.LinearCrossEntropyLoss"
)
DPO = names("torchtune.rlhf.loss.DPOLoss torchtune.rlhf.loss.dpo.DPOLoss")
HUGGING_FACE = "torchtune.training.FullModelHFCheckpointer"
FAMILIES = names("llama2 code_llama2 llama3 llama3_1 llama3_2 llama3_3 mistral qwen2 qwen2_5 qwen3 gemma gemma2")
"""Families whose layers have the same names in transformers, but for the output of the attention."""
FUSED = names("phi3 phi4")
"""Families of which transformers makes one layer of several."""
BUILDER = re.compile(r"torchtune\.models\.(\w+)\.(qlora_|qdora_|lora_|dora_)?(\w+)")
LAYERS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""Layer of torchtune's attention -> that of transformers."""
MLP, OUTPUT = ("gate_proj", "up_proj", "down_proj"), "lm_head"


def model_section(ledger: Ledger) -> None:
    """Translate the model: the folder of the checkpointer, or torchtune's builder, which is a function that returns a
    module, as model._target_ expects.
    """
    key = f"model.{COMPONENT}"
    name = str(ledger.get(key, ""))
    if not name:
        return
    match, folder = BUILDER.fullmatch(name), ledger.get("checkpointer.checkpoint_dir")
    adapted = bool(match and match[2]) or ledger.get("model.lora_rank") or ledger.get("model.quantize_base")
    known = (
        match
        and match[1] in (FAMILIES if adapted else FAMILIES | FUSED)
        and not re.search(r"reward|classifier|vision", match[3])
    )
    if known and folder and ledger.get(f"checkpointer.{COMPONENT}") == HUGGING_FACE:
        ledger.carry(key, {"model": "hf"}, "its config.json says the same model")
        ledger.carry("checkpointer.checkpoint_dir", {"model.name": str(folder)})
        files = unneeded("the weights are those of the folder")
        ledger.settle(
            files, f"checkpointer.{COMPONENT}", "checkpointer.checkpoint_files", "checkpointer.checkpoint_files.**"
        )
        ledger.settle(files, "checkpointer.model_type")
        if adapted:
            assert match
            _adapter(ledger, str(match[2] or ""))
        ledger.settle(lacking("config.json says it. Type model.config={<its name there>: <value>}."), "model.**")
        return
    why = ""
    if adapted:
        why = (
            "adapters are for models by the names of transformers. Type model=hf model.name=<folder> adapter=lora "
            "adapter.rank=<rank>."
        )
    elif not re.fullmatch(r"torchtune(\.\w+)+", name):  # only the user may trust code, never a file
        target = screen.typed(f"model._target_={name}")
        why = f"{name} is not part of torchtune. If you trust its package, type {target} trust=[<the package>]."
    if why:
        ledger.settle(refused(why, "model"), "model.**")
        if adapted:
            ledger.ask("adapter", "lora")
        return
    ledger.carry(key, {"model._target_": name}, "needs trust=[torchtune]")
    ledger.command["trust"] = "[torchtune]"
    for other in ledger.under("model"):
        if COMPONENT in other:
            ledger.refuse(other, "this argument is an object. Type model.<argument>._target_=<its class>.")
        else:
            ledger.carry(other, {other: ledger.leaves[other]})


def _adapter(ledger: Ledger, prefix: str) -> None:
    """Translate the arguments of a LoRA builder; a quantised base is asked for."""
    word = "dora" if ledger.get("model.use_dora") or "dora" in prefix else "lora"
    whole = not ledger.get("model.quantize_base") and not prefix.startswith("q")
    if whole:
        ledger.imply({"adapter": word}, "the builder is one of LoRA")
    else:
        ledger.settle(refused(WHOLE.format(word)), "model.quantize_base")
        ledger.ask("adapter", word)
    on_command = not whole
    ledger.settle(switched(says({"adapter": "dora"}) if whole else COVERED, COVERED), "model.use_dora")
    ledger.settle(COVERED, "model.quantize_base")
    for argument, kind in (("rank", count), ("alpha", positive), ("dropout", number)):
        ledger.settle(given(to(f"adapter.{argument}", kind, command=on_command)), f"model.lora_{argument}")
    if not on_command:
        ledger.imply({"adapter.rank": 8, "adapter.alpha": 16}, "default of torchtune's builders")
    listed = ledger.get("model.lora_attn_modules")
    if not isinstance(listed, list) or not listed or not all(each in LAYERS for each in listed):
        ledger.settle(refused("unknown layers. Type adapter.targets=[q_proj,v_proj].", "adapter.targets"), *TARGETS)
        return
    targets = [LAYERS[each] for each in listed]
    targets += [*MLP] * bool(ledger.get("model.apply_lora_to_mlp"))
    targets += [OUTPUT] * bool(ledger.get("model.apply_lora_to_output"))
    if TARGETS[0] in ledger.open():
        carry_targets(ledger, TARGETS[0], targets, "", on_command)
    ledger.settle(COVERED, *TARGETS)


COVERED = unneeded("covered by the words of the adapter")
TARGETS = ("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output")


def objective_section(ledger: Ledger) -> None:
    """Translate the loss."""
    name, rule = str(ledger.get(f"loss.{COMPONENT}")), NONE
    if ledger.under("kd_loss", "teacher_model", "kd_ratio"):
        ledger.ask("objective", "distill")
        rule = unneeded("a part of the loss of distillation")
    elif name in LOSSES:
        ledger.carry(f"loss.{COMPONENT}", {"objective": "next_token"})
        rule = unneeded("the chunking of the logits; -100 is ignored, as here")
    elif name in DPO:
        ledger.carry(f"loss.{COMPONENT}", {"objective": "dpo"})
        ledger.settle(given(to("objective.beta", positive)), "loss.beta")
        ledger.settle(given(to("objective.label_smoothing")), "loss.label_smoothing")
        ledger.imply({"objective.beta": 0.1}, "default of torchtune")
        _reference(ledger)
    ledger.settle(rule, "loss", "loss.**")


def _reference(ledger: Ledger) -> None:
    """The reference of objective=dpo is what the run begins with."""
    folder = ledger.get("ref_checkpointer.checkpoint_dir")
    if folder is not None and folder == ledger.get("checkpointer.checkpoint_dir"):
        ledger.settle(unneeded("the reference is the model that the run begins with, as here"), "ref_checkpointer.**")


NONE = refused(
    "unknown loss. Type objective=next_token or dpo, or objective._target_=<yours> trust=[<its package>].", "objective"
)
