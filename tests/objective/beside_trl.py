"""Loss, rewards and gradients of TRL's DPOTrainer and of objective=dpo, on the batch that TRL's collator makes of text.

python beside_trl.py <work folder>      # prints one JSON line for each case: ours and theirs
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig
from small import mesh_of
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from dtrain.build import build
from dtrain.loop.reference import Frozen, Reference
from dtrain.model.adapted import added
from dtrain.objective import loss_of
from dtrain.objective.dpo import DPO

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "to",
    "it",
    "then",
    "all",
    "of",
    "them",
    "went",
    "home",
    "for",
    "tea",
]
TARGETS = ["q_proj", "v_proj", "down_proj"]
BETA = 0.3


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *dict.fromkeys(WORDS)])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rows(count: int) -> Dataset:
    draw = torch.Generator().manual_seed(3)

    def words(most: int) -> str:
        size = int(torch.randint(1, most, (), generator=draw))
        return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (size,), generator=draw))

    some = [
        {"prompt": words(6), "chosen": f" {words(7)} <eos>", "rejected": f" {words(7)} <eos>"} for _ in range(count)
    ]
    return Dataset.from_list(some)


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def moved(model: nn.Module, seed: int) -> None:
    """Away from the reference, as training does."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)


def trainer(folder: str, size: int, loss: str, smoothing: float, *, lora: bool) -> DPOTrainer:
    config = DPOConfig(
        folder, per_device_train_batch_size=size, beta=BETA, loss_type=[loss], label_smoothing=smoothing,
        use_cpu=True, report_to=[], gradient_checkpointing=False, bf16=False, max_length=None, disable_dropout=True,
    )  # fmt: skip
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS) if lora else None
    llama(0).save_pretrained(f"{folder}/llama")
    made = DPOTrainer(
        f"{folder}/llama", args=config, train_dataset=rows(6), processing_class=tokenizer(), peft_config=adapter
    )
    moved(made.model, 1)
    return made


def pairs(batch: dict[str, Tensor]) -> dict[str, Any]:
    """TRL's rows [2B, T], all chosen ones first, as pairs [B, 2, T - 1] with the next tokens as targets."""
    inputs = {name: batch[name][:, :-1] for name in ("input_ids", "attention_mask")}
    targets = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)[:, 1:]
    both = {name: torch.stack(each.chunk(2), 1) for name, each in {**inputs, "targets": targets}.items()}
    return {"targets": both.pop("targets"), "inputs": both}


def ours(theirs: DPOTrainer, batch: dict[str, Any], loss: str, smoothing: float, *, lora: bool) -> dict[str, Any]:
    objective, model = DPO(beta=BETA, loss=loss, label_smoothing=smoothing), llama(0)  # type: ignore[arg-type]
    with mesh_of() as mesh:
        precision = build({"_target_": "dtrain.precision.fp32.build"})
        if lora:
            adapter = {"targets": TARGETS, "rank": 4, "alpha": 8, "dropout": 0.0}
            build({"_target_": "dtrain.adapter.lora.build", **adapter})(model)
            named = {f"base_model.model.{name}": name for name in added(model)}
            there = {name.replace(".default.weight", ""): each for name, each in theirs.model.named_parameters()}
            with torch.no_grad():
                for name, own in named.items():
                    model.get_parameter(own).copy_(there[name])
            reference = Reference(model, model, objective, mesh, precision)
        else:
            named = {name: name for name, _ in model.named_parameters()}
            reference = Frozen(
                llama(0).requires_grad_(False), llama(0).requires_grad_(False), objective, mesh, precision
            )
            moved(model, 1)
        count, inputs = objective.count(batch), objective.inputs(batch)
        found = loss_of(objective, model(**inputs), reference(batch, inputs))
        (found.sum / count).backward()
    means = {name: value.item() / count for name, value in found.metrics.items()}
    gradients = {name: model.get_parameter(own).grad for name, own in named.items()}
    return {"loss": found.sum.item() / count, **means, "gradients": gradients}


def case(folder: str, size: int, loss: str, smoothing: float, *, lora: bool) -> dict[str, Any]:
    theirs = trainer(folder, size, "aot" if smoothing else loss, smoothing, lora=lora)
    theirs.model.train()
    batch = next(iter(theirs.get_train_dataloader()))
    value = theirs.compute_loss(theirs.model, dict(batch))
    value.backward()
    seen = {name: each[-1] for name, each in theirs._metrics["train"].items() if name.startswith("rewards/")}
    mine = ours(theirs, pairs(batch), loss, smoothing, lora=lora)
    gradients = mine.pop("gradients")
    there = {name.replace(".default.weight", ""): each.grad for name, each in theirs.model.named_parameters()}
    apart = [float((gradients[name] - there[name]).abs().max() / there[name].abs().max()) for name in gradients]
    names = {"reward_chosen": "chosen", "reward_rejected": "rejected", "reward_margin": "margins", "reward_accuracy": "accuracies"}  # fmt: skip
    return {
        "case": [loss, smoothing, lora, size], "ours": mine, "rows": list(batch["input_ids"].shape),
        "theirs": {"loss": value.item(), **{own: seen[f"rewards/{name}"] for own, name in names.items()}},
        "gradients": max(apart), "tensors": len(apart),
    }  # fmt: skip


if __name__ == "__main__":
    for loss, smoothing, size in (("sigmoid", 0.0, 4), ("hinge", 0.0, 4), ("ipo", 0.0, 4), ("sigmoid", 0.2, 1)):
        for lora in (False, True):
            print(json.dumps(case(sys.argv[1], size, loss, smoothing, lora=lora)))
