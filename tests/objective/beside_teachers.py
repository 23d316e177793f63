"""Loss and gradients of objective=distill, and of plain torch on the same models of transformers.

python beside_teachers.py <work folder>      # prints one JSON line for each case: ours and theirs
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import small
import torch
import torch.nn.functional as F
from small import mesh_of
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from dtrain.build import build
from dtrain.loop.assemble import assemble, prepare

WORDS = (
    "objective=distill", "model=hf", "data=dataset", "data.dataset._target_=small.Uneven", "data.outputs=13", "data.holdout=0.0", "trust=[small]", "batch=8",
    "microbatch=4", "steps=1", "hook=[]", "logger=[]",
)  # fmt: skip


def llama(layers: int, width: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=13, hidden_size=width, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    """With dropout, which a teacher must not use."""
    config = GPT2Config(vocab_size=13, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.2)
    return GPT2LMHeadModel(config)


def ours(student: str, teacher: str, temperature: float, hard: float) -> tuple[float, dict[str, Any], list[Any]]:
    words = [f"model.name={student}", f"objective.teacher={teacher}"]
    words += [f"objective.temperature={temperature}", f"objective.hard={hard}", f"out={student}.out"]
    with mesh_of() as mesh:
        plan = small.plan(*WORDS, *words)
        parts = assemble(plan, mesh, brought=True)
        batches, count = list[Any](), parts.objective.count
        parts.objective.count = lambda batch: batches.append(batch) or count(batch)  # type: ignore
        training = prepare(parts)
        checkpoint = build(plan.checkpoint, out=plan.out, mesh=mesh, resume="never")
        checkpoint.load_weights(plan.init, training.state)
        parts.begin(checkpoint, training.state)
        loss = training.step(training.stream, 0)
        training.stream.close()
        gradients = {name: each.grad for name, each in parts.model.named_parameters() if each.grad is not None}
        assert parts.reference and not any(each.requires_grad for each in parts.reference.model.parameters())
        return loss.sums["loss"].item() / loss.count, gradients, batches


def theirs(student: str, teacher: str, temperature: float, hard: float, rows: list[Any]) -> tuple[float, Any]:
    """The mean over all tokens of the batch that count, in one forward."""
    model, large = (AutoModelForCausalLM.from_pretrained(each) for each in (student, teacher))
    inputs, targets = (torch.cat([each[name] for each in rows]) for name in ("inputs", "targets"))
    counts = targets != -100
    with torch.no_grad():
        p = F.log_softmax(large.eval()(inputs).logits[counts] / temperature, -1)
    logits = model.train()(inputs).logits[counts]
    kl = F.kl_div(F.log_softmax(logits / temperature, -1), p, log_target=True, reduction="batchmean")
    loss = (1 - hard) * temperature**2 * kl + hard * F.cross_entropy(logits, targets[counts])
    loss.backward()
    return loss.item(), dict(model.named_parameters())


def main(folder: Path) -> None:
    torch.manual_seed(0)
    made = {"student": llama(2, 32), "gpt2": gpt2(), "llama": llama(3, 48)}
    for name, model in made.items():
        model.save_pretrained(folder / name)
    for teacher in ("gpt2", "llama"):
        for temperature, hard in ((1.0, 0.0), (2.0, 0.5), (4.0, 0.1)):
            asked = str(folder / "student"), str(folder / teacher), temperature, hard
            loss, gradients, rows = ours(*asked)
            expected, parameters = theirs(*asked, rows)
            worst = max(
                ((gradients[name] - each.grad).norm() / each.grad.norm()).item() for name, each in parameters.items()
            )
            case = f"{teacher} T={temperature} hard={hard}"
            print(json.dumps({"case": case, "ours": loss, "theirs": expected, "gradients": worst, "tensors": len(gradients)}))  # fmt: skip


main(Path(sys.argv[1]))
