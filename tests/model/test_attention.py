"""Padding that a model would read: it is told by an attention_mask where that is needed, and nowhere else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.readers import Mean, bert, t5
from pool import resident
from small import plan
from torch import Tensor, nn

from dtrain.data import jsonl
from dtrain.errors import WordsError
from dtrain.evaluation.predict import predict
from dtrain.model.attention import check_padding, mask_beside, unmasked
from dtrain.train import train

ALWAYS = "steps=2 optim=sgd optim.lr=0.1 schedule.warmup=0 logger=[] hook=[] trust=[data] data=dataset data.pad=0 data.holdout=0.25 evaluate.every=0"
BERT = "model._target_=data.readers.bert data.dataset._target_=data.readers.Classes objective=classification"
T5 = "model._target_=data.readers.t5 data.dataset._target_=data.readers.Texts data.inputs=x data.targets=y objective=own objective.together=4"
MEAN = "model._target_=data.readers.Mean data.dataset._target_=data.readers.Series objective=regression"


def asked(out: Path, *words: str) -> Any:
    return plan(*ALWAYS.split(), *(each for several in words for each in several.split()), f"out={out}")


def ran(out: Path, *words: str) -> tuple[float, float]:
    """(loss, held-out loss)"""
    made = asked(out, *words)
    result = resident(made.world, train, made)[0]
    assert result.loss is not None
    return result.loss, result.metrics["eval_loss"]


@pytest.mark.parametrize("words", [BERT, T5, MEAN], ids=["bert", "t5", "own"])
def test_no_number_depends_on_the_length_to_which_rows_are_padded(words: str, tmp_path: Path) -> None:
    one = words == T5  # its loss is of all of a batch
    expected = ran(tmp_path / "one", words, "batch=4 devices=1", "" if one else "microbatch=1")
    for number, shape in enumerate(("data.length=8", "data.length=12", "devices=2 strategy=ddp")[: 2 if one else 3]):
        found = ran(tmp_path / str(number), words, f"batch=4 {'' if 'devices' in shape else 'devices=1'}", shape)
        assert found == pytest.approx(expected, rel=5e-6), shape


def test_predictions_do_not_depend_on_the_rows_beside(tmp_path: Path) -> None:
    for kind, words in (("bert", BERT), ("mean", MEAN)):
        ran(tmp_path / kind, words, "batch=4 devices=1")
        rows = []
        for batch in (1, 3):
            to = tmp_path / f"{kind}{batch}.jsonl"
            more = f"devices=1 batch=4 predict.batch={batch} predict.part=6 predict.to={to}"
            resident(1, predict, asked(tmp_path / kind, words, more, "predict.scores=logits" * (kind == "bert")))
            rows.append([json.loads(line) for line in to.read_text().splitlines()])
        for one, other in zip(*rows, strict=True):
            name = "logits" if kind == "bert" else "prediction"
            assert one[name] == pytest.approx(other[name], rel=1e-5) and len(one[name]) == len(other[name])
    sizes = {len(row["prediction"]) for row in rows[0]}
    assert len(sizes) > 1, "an answer for each entry of a row, and none for padding"


def test_a_mask_is_made_for_models_that_read_both_ways() -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 13,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
    }

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    routed = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**small, num_local_experts=2, output_router_logits=True)
    )
    causal = transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=13, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, is_decoder=True
        )
    )
    for model, name in (
        (bert(), "input_ids"), (t5(), "input_ids"), (Mean(), "series"), (routed, "input_ids"),
        (llama, None), (causal, None), (Plain(), None), (nn.Linear(2, 2), None),
    ):  # fmt: skip
        assert mask_beside(model) == name, type(model)

    judge = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**small, pad_token_id=2))
    check_padding(judge, 2)
    check_padding(bert(), 5)
    with pytest.raises(WordsError, match=r"data\.pad=0: .*pad_token_id, which is 2 .* Type data\.pad=2"):
        check_padding(judge, 0)


def test_masks_that_are_named_are_made_from_files_too(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [1] * (1 + i % 3), "y": i % 2}) + "\n" for i in range(8)))
    source = jsonl.build(
        path=str(path), inputs=["input_ids", "attention_mask"], targets="y", holdout=0.0, shift=False, outputs=None, pad=9,
        length=None, packing="none", sequence=None, cache=str(tmp_path),
    )  # fmt: skip
    batch = source.take(np.arange(8), np.zeros(8, int))["inputs"]
    assert torch.equal(batch["input_ids"] == 9, batch["attention_mask"] == 0) and batch["attention_mask"].sum() == 15


class Pooled(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids


class PooledWithMask(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return input_ids * attention_mask


class PooledWithMore(nn.Module):
    def forward(self, input_ids: Tensor, **more: Tensor) -> Tensor:
        return input_ids * more.get("attention_mask", 1)


def test_a_model_that_gets_padding_and_no_mask_is_told() -> None:
    assert mask_beside(PooledWithMore()) is None, "nobody knows where more arguments go"
    (sentence,) = unmasked(PooledWithMore(), 0, ["input_ids"])
    assert "If its **more may have it, type data.inputs=[<the inputs>,attention_mask]" in sentence
    assert not unmasked(PooledWithMore(), 0, ["input_ids", "attention_mask"])
    (sentence,) = unmasked(Pooled(), 0, ["input_ids"])
    assert "the forward of Pooled takes no attention_mask" in sentence
    assert unmasked(PooledWithMask(), 0, None) == unmasked(Pooled(), None, None) == []
