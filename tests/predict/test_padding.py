import re

import pytest
import torch
from small import plan

from dtrain.cluster import Cluster
from dtrain.model.gpt import GPT
from dtrain.planned import Plan
from dtrain.predict.padding import padding, sentence
from dtrain.predict.prediction import predict
from dtrain.predict.report import rows
from dtrain.tracing import shapes_of

GPUS = Cluster(gpus=8, cpus=64, memory=80 << 30, gpu="NVIDIA H100 80GB HBM3")
WORDS = ("model=gpt", "data=synthetic", "model.layers=2", "model.width=128", "model.heads=4", "model.kv_heads=1", "batch=512", "microbatch=1")  # fmt: skip


def on_512(*words: str) -> Plan:
    return plan(*WORDS, "nodes=64", *words, on=GPUS)


def of_torch(shards: int) -> float:
    """Every rank's shard is as large as the first of torch.chunk, which FSDP2 cuts with."""
    with torch.device("meta"):
        weights = list(GPT(vocab=256, layers=2, heads=4, width=128, kv_heads=1).parameters())
    return (
        sum(shards * torch.chunk(each, shards)[0].numel() for each in weights) / sum(each.numel() for each in weights)
        - 1
    )


@pytest.mark.parametrize("shards", [64, 256, 512])
def test_padding_is_what_torchs_chunks_lack(shards: int) -> None:
    wide = on_512("strategy=fsdp", f"mesh.dp_replicate={512 // shards}")
    assert padding(wide, shapes_of(wide)) == pytest.approx(of_torch(shards))


@pytest.mark.parametrize("words", [("strategy=fsdp",), ("strategy=zero1",), ("strategy=fsdp", "mesh.cp=2"), ("strategy=hsdp", "mesh.dp_replicate=2", "mesh.dp_shard=256")])  # fmt: skip
def test_the_words_to_type_leave_as_little_as_they_say(words: tuple[str, ...]) -> None:
    wide = on_512(*words)
    (typed,) = re.findall(r"Type (.*): ", sentence(wide, shapes_of(wide)))
    fewer = on_512(*(word for word in words if "dp_" not in word), *typed.split())
    assert fewer.world == wide.world and fewer.batch == wide.batch
    assert f"add {padding(fewer, shapes_of(fewer)):.0%}" in sentence(wide, shapes_of(wide))
    assert not sentence(fewer, shapes_of(fewer))


def test_it_is_a_row_of_the_plan_where_it_matters() -> None:
    for words, there in (
        (("strategy=fsdp",), True),
        (("strategy=ddp",), False),
        (("strategy=fsdp", "mesh.dp_replicate=64"), False),
    ):
        wide = on_512(*words)
        assert ("padding" in dict(rows(wide, predict(wide, shapes_of(wide))))) is there
