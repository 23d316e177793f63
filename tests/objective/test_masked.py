"""masked: the loss of transformers for the same mask, masks of seed, row and pass alone, and the same on every mesh."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import torch
from adapted import MESHES
from paired import twenty_steps
from small import PARTS, agree, few_steps, on_mesh, plan

from dtrain.build import build
from dtrain.data import IGNORE
from dtrain.data.synthetic import Synthetic
from dtrain.errors import WordsError
from dtrain.loop.assemble import assemble
from dtrain.mesh import Mesh
from dtrain.objective import prepared

MASKED = {"_target_": "dtrain.objective.masked.Masked", "part": 0.15, "hidden": 0.8, "random": 0.1, "token": None}
SPECIALS = {"[PAD]": 0, "[MASK]": 4}


class Spoken(Synthetic):
    """Tokens with special ones among them."""

    specials = SPECIALS


def source(seed: int = 1, **changed: Any) -> Any:
    inner = Spoken(task="next_token", inputs=[4], outputs=3, vocab=50, sequence=64, samples=400, holdout_part=0.1)
    return prepared(build({**MASKED, **changed}), inner, seed)


def parts_of() -> dict[str, Any]:
    data = PARTS["data"] | {"_target_": "objective.test_masked.Spoken"}
    model = PARTS["model"] | {"_target_": "adapted.filled", "tied": False}
    return PARTS | {"data": data, "model": model, "objective": MASKED | {"part": 0.4}}


one = cache(lambda: few_steps(parts_of(), {}, steps=20))


@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2", pytest.param("ddp 2", marks=pytest.mark.campaign("8 ranks"))])
def test_it_trains_alike_on_every_mesh(mesh: str) -> None:
    agree(twenty_steps(parts_of(), MESHES[mesh]), one(), tolerance=2e-6)


def test_a_row_has_the_same_mask_whoever_reads_it_with_whatever() -> None:
    made, index = source(), np.array([3, 7, 11])
    whole = made.take(index, np.zeros_like(index))
    alone = source().take(index[1:2], np.zeros(1, np.int64))
    assert torch.equal(alone["inputs"][0], whole["inputs"][1]) and torch.equal(alone["targets"][0], whole["targets"][1])
    for other in (made.take(index, np.ones_like(index)), source(seed=2).take(index, np.zeros_like(index))):
        assert not torch.equal(other["targets"] == IGNORE, whole["targets"] == IGNORE)
    assert len({source().fingerprint, source(part=0.2).fingerprint, source(hidden=0.7).fingerprint}) == 3


def test_the_parts_are_those_of_bert_and_special_tokens_are_never_hidden() -> None:
    made = source()
    index = np.arange(400)
    batch = made.take(index, np.zeros_like(index))
    tokens = made._inner.take(index, np.zeros_like(index))["inputs"]
    inputs, targets = batch["inputs"], batch["targets"]
    chosen = targets != IGNORE
    ordinary = ~torch.isin(tokens, torch.tensor([*SPECIALS.values()]))
    assert torch.equal(targets[chosen], tokens[chosen]) and torch.equal(inputs[~chosen], tokens[~chosen])
    assert not (chosen & ~ordinary).any()
    assert chosen.sum() / ordinary.sum() == pytest.approx(0.15, abs=0.01)
    assert (inputs[chosen] == 4).float().mean() == pytest.approx(0.8 + 0.1 / 50, abs=0.02)
    assert (inputs[chosen] == targets[chosen]).float().mean() == pytest.approx(0.1 + 0.1 / 50, abs=0.02)
    held = made.holdout().take(index[:5], index[:5])
    assert (held["targets"] != IGNORE).any()


def test_a_set_of_evaluate_sets_is_hidden_too() -> None:
    made = plan("data=synthetic", "objective=next_token", "data.sequence=8", "hook=[]", "out=memory://masked")
    part = {**parts_of()["data"], "task": "next_token"}
    made = replace(made, objective=MASKED, data=part, evaluate_sets={"all": part}, model=parts_of()["model"])
    index = np.arange(20)

    def hidden(mesh: Mesh) -> float:
        batch = assemble(made, mesh).measured["all"].take(index, index * 0)
        return float((batch["targets"] == IGNORE).float().mean())

    assert on_mesh(hidden, dp_shard=1)[0] > 0.7


BERT = """
import json, sys, torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from dtrain.build import build
from dtrain.objective import loss_of
names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(45))]
inner = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="[UNK]"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="[MASK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")
torch.manual_seed(0)
config = transformers.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
model = transformers.BertForMaskedLM(config).eval()
rows = torch.randint(5, 50, (8, 24))
collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
batch = collate([{"input_ids": row} for row in rows])
theirs = model(**batch).loss
theirs.backward()
gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
model.zero_grad()
objective = build(json.loads(sys.argv[1]))
mine = {"inputs": batch["input_ids"], "targets": batch["labels"]}
loss = loss_of(objective, model(objective.inputs(mine)), mine).sum / objective.count(mine)
loss.backward()
apart = max(float((each.grad - gradients[name]).abs().max()) for name, each in model.named_parameters())
print(json.dumps([loss.item(), theirs.item(), apart]))
"""


def test_the_loss_of_transformers_for_the_same_mask() -> None:
    done = commands.python("-c", BERT, json.dumps(MASKED))
    assert done.returncode == 0, done.stderr
    ours, theirs, apart = json.loads(done.stdout.splitlines()[-1])
    assert ours == pytest.approx(theirs, rel=1e-6) and apart < 1e-6


TEXT = ("objective=masked", "data=text", "data.tokenizer=tokenizer.json")
HF = ("model=hf", "model.name=bert", "model.task=masked_lm")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (TEXT, "objective=masked needs a model that reads a row in both directions, and model=gpt reads forwards. Type model=hf"),
        ((*TEXT, *HF, "model.task=causal_lm"), "the head of model=hf is for model.task=causal_lm. Type model.task=masked_lm."),
        (("objective=masked", "data=text", *HF), "needs a mask token, and data.tokenizer=bytes has none"),
        (("objective=masked", "data=synthetic", *HF), "hides tokens of plain text, and data=synthetic is none"),
        ((*TEXT, *HF, "data.packing=pack"), "objective=masked hides tokens of rows that are not packed"),
        ((*TEXT, *HF, "objective.hidden=0.9", "objective.random=0.2"), "are more than all targets. Type objective.random=0.1."),
        ((*TEXT, *HF, "objective.part=0"), "objective.part is a number > 0 and <= 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_launch(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*words)
    assert message in str(caught.value)


def test_a_tokenizer_without_a_mask_token_is_refused_by_what_it_has() -> None:
    with pytest.raises(WordsError, match=r"has no <msk>.*special tokens are \[PAD\], \[MASK\]"):
        source(token="<msk>")
    assert source(token="[PAD]").take(np.array([0]), np.array([0]))
    with pytest.raises(WordsError, match=r"no \[MASK\] nor <mask>"):
        prepared(build(MASKED), Synthetic(task="next_token", inputs=[4], outputs=3, vocab=13, sequence=8, samples=9), 0)


@pytest.mark.campaign("documents")
def test_a_bert_is_trained_on_text(tmp_path: Path) -> None:
    """The words of docs/fine-tuning.md, with a small model; what is evaluated again is what was evaluated."""
    make = BERT[: BERT.index("rows =")] + "tokenizer.save_pretrained('bert'); model.save_pretrained('bert')"
    assert commands.python("-c", make, json.dumps(MASKED), cwd=tmp_path).returncode == 0
    (tmp_path / "a.txt").write_text(" ".join(f"w{number * number % 45}" for number in range(4000)))
    words = [
        *HF,
        "objective=masked",
        "data.path=a.txt",
        "data.tokenizer=bert/tokenizer.json",
        "data.sequence=16",
        "data.cache=cache",
    ]
    small = ["steps=30", "hook=[]", "optim.lr=0.01", "out=run"]
    done = commands.run(*words, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trained = json.loads((tmp_path / "run/result.json").read_text())["metrics"]
    assert trained["eval_loss"] < 3.0
    done = commands.run("evaluate", "out=run", cwd=tmp_path)
    assert done.returncode == 0 and f"{trained['eval_loss']:.4f}" in done.stdout, done.stdout + done.stderr
