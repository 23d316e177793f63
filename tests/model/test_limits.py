"""Tokens and positions that a model has no embedding of are refused on every mesh, before they are used."""

from typing import Any

import pytest
import torch
from pool import RankFailed, resident
from small import plan
from torch import nn

from dtrain.errors import WordsError
from dtrain.model.gpt import GPT
from dtrain.model.limits import Limits, limits_of
from dtrain.train import train

SMALL = {"vocab_size": 19, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def batch(tokens: Any, **others: Any) -> dict[str, Any]:
    return {"inputs": {"input_ids": torch.tensor(tokens), **others} if others else torch.tensor(tokens)}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (batch([[1, 19]]), "the token 19, and M has embeddings of the tokens 0 to 18"),
        (batch([[1, -3]]), "the token -3"),
        (batch([[[1, 2], [3, 40]]], attention_mask=0), "the token 40"),
        (batch([[1.0, 2.5]], attention_mask=0), "input_ids has fractions"),
        (batch([[1] * 7]), "a row has 7 tokens, and M has positions for 6. Type data.sequence=6"),
        (batch([[1] * 7], position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 6]])), "a row has 7 tokens"),
    ],
    ids=str,
)
def test_what_has_no_embedding_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WordsError, match=sentence):
        Limits("M", 19, 6).check(given)


def test_what_has_one_is_taken() -> None:
    limits = Limits("M", 19, 6)
    limits.check(batch([[0, 18]]))
    limits.check(batch([[1] * 7], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]])))
    limits.check(batch([[0.5] * 9]))
    limits.check({"inputs": {"pixel_values": torch.zeros(2, 3)}})


@pytest.mark.parametrize(
    "mesh", [("strategy=single", "devices=1"), ("strategy=ddp", "devices=2", "mesh.tp=2")], ids=str
)
def test_a_token_without_an_embedding_is_the_same_sentence_on_every_mesh(mesh: tuple[str, ...], tmp_path: Any) -> None:
    """Under mesh.tp torch's embedding gives zeros for it."""
    words = f"model=gpt model.vocab=16 model.width=8 model.layers=1 model.heads=2 data=jsonl data.path={tmp_path}/rows.jsonl data.inputs=x data.targets=y data.outputs=16 objective=next_token steps=1 batch=2 data.holdout=0 logger=[] hook=[] data.cache={tmp_path}/cache"
    (tmp_path / "rows.jsonl").write_text('{"x": [1, 16, 3], "y": [1, 2, 3]}\n' * 4)
    asked = plan(*words.split(), *mesh, f"out={tmp_path}/run")
    with pytest.raises((WordsError, RankFailed), match="the token 16, and GPT has embeddings of the tokens 0 to 15"):
        resident(asked.world, train, asked)


def test_the_limits_of_models() -> None:
    HF = pytest.importorskip("transformers")
    gpt2 = HF.GPT2LMHeadModel(HF.GPT2Config(vocab_size=19, n_positions=6, n_embd=8, n_layer=1, n_head=2))
    opt = HF.OPTForCausalLM(HF.OPTConfig(**SMALL, ffn_dim=8, max_position_embeddings=6, word_embed_proj_dim=8))
    roberta = HF.RobertaModel(HF.RobertaConfig(**SMALL, max_position_embeddings=9))
    found = {type(each).__name__: limits_of(each) for each in (gpt2, opt, roberta)}
    assert found["GPT2LMHeadModel"] == Limits("GPT2LMHeadModel", 19, 6)
    assert found["OPTForCausalLM"] == Limits("OPTForCausalLM", 19, 6)
    assert found["RobertaModel"].positions is None, "padding has no position of its own there"
    assert limits_of(GPT(vocab=19, width=8, layers=1, heads=2)) == Limits("GPT", 19)
    assert limits_of(nn.Sequential(nn.Linear(3, 3), nn.Embedding(5, 3))).tokens is None
