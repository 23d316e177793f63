from small import plan

from dtrain.cluster import Cluster
from dtrain.predict import picture

GPUS = Cluster(gpus=8, cpus=64, memory=80 << 30, gpu="NVIDIA H100 80GB HBM3")
GPT = ("model=gpt", "data=synthetic", "data.sequence=16", "model.layers=16")


def test_a_pipeline_is_a_row_for_each_rank() -> None:
    """1f1b as in figure 4 of arXiv 2104.04473: a backward takes two forwards."""
    drawn = picture.pipeline(plan(*GPT, "devices=4", "strategy=pipeline", "batch=4", "accumulate=4"), width=50)
    assert drawn[:4] == [
        "0 00112233············aaaa··bbbb··cccc··dddd",
        "1 ··001122········aaaa33bbbb··cccc··dddd····",
        "2 ····0011····aaaa22bbbb33cccc··dddd········",
        "3 ······00aaaa11bbbb22cccc33dddd············",
    ]


def test_backwards_of_weights_alone_are_seen() -> None:
    asked = plan(*GPT, "devices=2", "strategy=pipeline", "batch=4", "accumulate=4", "pipeline.schedule=zbv")
    assert picture.pipeline(asked, width=32)[:2] == ["0 0120aA1bB3aA2cCbB3dDcCdD·", "1 ·0011aA2aA2bB3bB3cCcddCDD"]


def test_no_line_is_wider_than_asked() -> None:
    for schedule in ("1f1b", "gpipe", "zbv", "interleaved_zero_bubble"):
        asked = plan(
            *GPT, "devices=4", "strategy=pipeline", "batch=64", "accumulate=64", f"pipeline.schedule={schedule}"
        )
        for width in (40, 80, 120):
            rows = picture.pipeline(asked, width)
            assert all(len(row) <= width for row in rows[:4])
            assert len({len(row) for row in rows[:4]}) == 1
            assert "the step has 64" in rows[-1]


def test_a_mesh_on_two_nodes() -> None:
    drawn = picture.mesh(plan(*GPT, "nodes=2", "devices=4", "strategy=fsdp", "mesh.tp=2", "batch=8"))
    assert drawn == [
        "node 0  [0 1] [2 3]",
        "node 1  [4 5] [6 7]",
        "dp_shard=4: 2 group(s) such as 0,2,4,6, across nodes",
        "tp=2: 4 group(s) such as 0,1, inside a node",
    ]


def test_a_large_world_is_one_node_and_a_number() -> None:
    asked = plan(
        *GPT,
        "nodes=128",
        "strategy=fsdp",
        "mesh.pp=4",
        "mesh.tp=8",
        "model.heads=8",
        "model.hidden=512",
        "batch=2048",
        "microbatch=1",
        on=GPUS,
    )
    assert picture.mesh(asked) == [
        "node 0  [0 1 2 3 4 5 6 7]",
        "127 more nodes, up to rank 1023",
        "pp=4: 256 group(s) such as 0,256,512,768, across nodes",
        "dp_shard=32: 32 group(s) such as 0,8,16,...,248, across nodes",
        "tp=8: 128 group(s) such as 0,1,2,3,4,5,6,7, inside a node",
    ]


def test_one_rank_is_no_picture() -> None:
    assert picture.mesh(plan(*GPT)) == picture.pipeline(plan(*GPT)) == []
