"""Weights of others in a model on every mesh: bit for bit those that their own library saved."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import RankFailed
from safetensors.torch import save_file
from servers import Server
from small import PARTS, STRATEGIES, on_mesh, small_gpt
from torch import Tensor
from torch.distributed import distributed_c10d

from dtrain.build import build
from dtrain.checkpoint import adopt as adopting
from dtrain.checkpoint import exchange
from dtrain.checkpoint.adopt import adopt, fill, read
from dtrain.checkpoint.state import TrainState
from dtrain.errors import StoreError
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local, offset
from dtrain.model.gpt import GPT
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape
from dtrain.storage import store
from dtrain.weights import ForeignError, Stored, Weights, names, place

UNPICKLE = distributed_c10d._tensor_to_object  # type: ignore[attr-defined]
"""With which torch's own save gathers its plan, and which the ranks of tests forbid."""
MESHES = [{}, {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"pp": 2}]
SIZES: dict[str, Any] = {"vocab": 26, "layers": 2, "heads": 4, "width": 32, "hidden": 48}


def trained(**changed: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in small_gpt(**SIZES, **changed).state_dict().items()}


def shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """As save_pretrained leaves them."""
    names = sorted(tensors)
    files = {f"model-0000{n + 1}-of-00003.safetensors": names[n::3] for n in range(3)}
    for file, inside in files.items():
        save_file({name: tensors[name].contiguous() for name in inside}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def save_dcp(folder: Path, tensors: dict[str, Tensor]) -> None:
    """From two ranks that hold halves."""

    def save(mesh: Mesh) -> None:
        distributed_c10d._tensor_to_object = UNPICKLE  # type: ignore[attr-defined]
        rows, width = tensors["head.weight"].shape
        hidden = tensors["blocks.0.feed_forward.up.weight"].shape[0]
        whole = small_gpt(**SIZES | {"vocab": rows, "width": width, "hidden": hidden, "tied": False})
        whole.load_state_dict(tensors)
        parallelize(whole, mesh, build(STRATEGIES["fsdp"]), precision=build(PARTS["precision"]), seed=0)
        dcp.save({"model": whole.state_dict(), "optimizer": {"step": 3}}, checkpoint_id=str(folder))

    on_mesh(save, dp_shard=2)


KINDS: dict[str, Callable[[Path, dict[str, Tensor]], Any]] = {
    "one": lambda folder, tensors: save_file(tensors, folder / "model.safetensors"),
    "sharded": shards,
    "bin": lambda folder, tensors: torch.save(tensors, folder / "pytorch_model.bin"),
    "dcp": save_dcp,
    "ckpt": lambda folder, tensors: torch.save(
        {
            "state_dict": {f"net.{name}": tensor for name, tensor in tensors.items()},
            "optimizer_states": [{"state": {}}],
        },
        folder / "last.ckpt",
    ),
}


def filled(mesh: Mesh, source: str, table: Any = None, **changed: Any) -> dict[str, tuple[Any, ...]]:
    """Name -> (offset, values) of this rank's parts after `adopt`."""
    with torch.device("meta"):
        model = GPT(**SIZES | changed)
    strategy = build(STRATEGIES["fsdp"] if mesh.shape.dp_shard > 1 else PARTS["strategy"])
    parallelize(
        model, mesh, strategy, precision=build(PARTS["precision"]), seed=0, brought=True,
        pipeline=PipelineShape() if mesh.shape.pp > 1 else None,
    )  # fmt: skip
    adopt(source, TrainState(model), mesh, table)
    return {name: (offset(p), local(p).detach().clone()) for name, p in model.state_dict().items()}


def equal(ranks: list[dict[str, tuple[Any, ...]]], expected: dict[str, Tensor]) -> None:
    seen = dict.fromkeys(expected, 0)
    for parts in ranks:
        for name, (begin, part) in parts.items():
            box = tuple(slice(a, a + n) for a, n in zip(begin, part.shape, strict=True))
            assert torch.equal(part, expected[name][box]), name
            seen[name] += part.numel()
    assert all(seen[name] >= tensor.numel() for name, tensor in expected.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of each kind, made once."""

    @cache
    def folder(kind: str) -> str:
        made: Path = tmp_path_factory.mktemp(kind)
        KINDS[kind](made, trained(tied=False))
        return str(next(made.glob("*.ckpt"), made))

    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_every_kind_fills_every_mesh_bit_for_bit(
    kind: str, degrees: dict[str, int], saved: Callable[[str], str]
) -> None:
    source = saved(kind)
    equal(on_mesh(lambda mesh: filled(mesh, source, tied=False), **degrees), trained(tied=False))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ckpt"])
def test_a_rank_reads_little_more_than_its_shards(kind: str, tmp_path: Path) -> None:
    large = {"tied": False, "vocab": 512, "width": 256, "hidden": 512}

    def count(mesh: Mesh) -> int:
        sizes, parts, read_into = list[int](), store.parts, adopting.read_into

        def counted(url: str, begins: Sequence[int], size: int) -> list[bytes]:
            sizes.append(len(begins) * size)
            return parts(url, begins, size)

        def into(url: str, runs: Sequence[tuple[int, int]], target: memoryview) -> int:
            sizes.append(len(target))
            return read_into(url, runs, target)

        with mock.patch.object(store, "parts", counted), mock.patch.object(adopting, "read_into", into):
            filled(mesh, str(tmp_path), **large)
        return sum(sizes)

    tensors = small_gpt(**SIZES | large).state_dict()
    KINDS[kind](tmp_path, tensors)
    whole = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert max(on_mesh(count, dp_shard=2, tp=2)) < 1.1 * whole / 4


SHARED = [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}]


@pytest.mark.parametrize("degrees", SHARED, ids=str)
def test_ranks_read_each_byte_of_other_storage_once_and_pass_it_on(degrees: dict[str, int], tmp_path: Path) -> None:
    large: dict[str, Any] = {"tied": False, "vocab": 512, "width": 256, "hidden": 512}
    tensors = {name: tensor.bfloat16() for name, tensor in small_gpt(**SIZES | large).state_dict().items()}
    shards(tmp_path, tensors)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def count(mesh: Mesh) -> tuple[int, int, Any]:
        asked, parts = list[int](), store.parts
        for name, data in files.items():  # a memory of its own
            store.write(f"memory://shared/{name}", data)

        def counted(url: str, begins: Sequence[int], size: int) -> list[bytes]:
            asked.extend([size] * len(begins))
            return parts(url, begins, size)

        with mock.patch.object(store, "parts", counted), mock.patch.object(exchange, "SMALL", 1 << 12):
            made = filled(mesh, "memory://shared", **large)
        return sum(asked), len(asked), made

    ranks = on_mesh(count, **degrees)
    equal([made for *_, made in ranks], {name: tensor.float() for name, tensor in tensors.items()})
    whole = sum(tensor.nbytes for tensor in tensors.values())
    share = 2 if "pp" in degrees else 1  # stages are of different sizes
    assert all(read < 1.1 * share * whole / len(ranks) for read, *_ in ranks)
    assert whole <= sum(read for read, *_ in ranks) < 1.1 * whole
    assert all(requests <= 2 * len(tensors) for _, requests, _ in ranks)


def test_a_rank_that_cannot_read_leaves_no_other_waiting(tmp_path: Path) -> None:
    shards(tmp_path, trained(tied=False))
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def load(mesh: Mesh) -> str:
        for name, data in files.items():
            is_cut = mesh.rank == 1 and name.startswith("model-00002")
            store.write(f"memory://cut/{name}", data[:-200] if is_cut else data)
        with mock.patch.object(place, "open_at", lambda _: weights), pytest.raises(StoreError) as caught:
            filled(mesh, "memory://cut", tied=False)
        return str(caught.value)

    for name, data in files.items():
        store.write(f"memory://cut/{name}", data)
    weights = place.open_at("memory://cut")
    assert {"rank 1: cannot read memory://cut/model-00002-of-00003.safetensors: it is cut off"} >= {
        text.split("cannot load memory://cut: ")[-1] for text in on_mesh(load, dp_replicate=2)
    }


def test_bf16_becomes_fp32_and_a_strided_tensor_its_values(tmp_path: Path) -> None:
    expected = trained(tied=False)
    half = {name: tensor.bfloat16() for name, tensor in expected.items()}
    half["head.weight"] = half["head.weight"].t().contiguous().t()
    assert not half["head.weight"].is_contiguous()
    torch.save(
        {"epoch": 3, "model_state_dict": half, "optimizer": {"state": {0: half["head.weight"]}}}, tmp_path / "a.pt"
    )
    after = {name: tensor.float() for name, tensor in half.items()}
    equal(on_mesh(lambda mesh: filled(mesh, str(tmp_path / "a.pt"), tied=False), dp_shard=2, tp=2), after)


def test_a_tied_weight_may_have_either_name(tmp_path: Path) -> None:
    expected = trained(tied=True)
    tied = [name for name, tensor in expected.items() if tensor.shape[0] == SIZES["vocab"]]
    assert len(tied) == 2
    for dropped in tied:
        file = tmp_path / f"{dropped}.safetensors"
        save_file({name: tensor for name, tensor in expected.items() if name != dropped}, file)
        equal(on_mesh(lambda mesh, file=file: filled(mesh, str(file), tied=True), dp_shard=2), expected)


@pytest.mark.parametrize(
    ("config", "copied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"architectures": ["Qwen2ForCausalLM"]}, True),
        ({"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}, False),
        ({"architectures": ["Qwen2Model"]}, False),
        (None, False),
    ],
)
def test_a_head_that_is_not_tied_begins_as_the_embedding_of_weights_that_are(config: Any, copied: bool) -> None:
    table = "model.embed_tokens.weight"
    weights = Weights("x", "a folder", {table: Stored("float32", (4, 2), ())}, config)
    matched = adopting.match(weights, [table, "lm_head.weight"], {}, names.table(None))
    assert matched.sources == ({table: table, "lm_head.weight": table} if copied else {table: table})
    assert bool(matched.faults) != copied


def test_weights_that_are_tied_here_and_differ_there_are_told(tmp_path: Path) -> None:
    apart = trained(tied=False)
    save_file(apart, tmp_path / "a.safetensors")
    with pytest.raises(RankFailed, match=r"tied here and different there \(1\): embed.weight and head.weight"):
        on_mesh(lambda mesh: filled(mesh, str(tmp_path / "a.safetensors"), tied=True), dp_shard=2)
    save_file(apart | {"head.weight": apart["embed.weight"].clone()}, tmp_path / "b.safetensors")
    expected = apart | {"head.weight": apart["embed.weight"]}
    equal(on_mesh(lambda mesh: filled(mesh, str(tmp_path / "b.safetensors"), tied=True), dp_shard=2), expected)


def test_names_are_mapped_and_a_common_prefix_needs_no_table(tmp_path: Path) -> None:
    expected = trained(tied=False)
    save_file({f"module.net.{name}": tensor for name, tensor in expected.items()}, tmp_path / "a.safetensors")
    equal([filled_alone(str(tmp_path / "a.safetensors"))], expected)
    other = {name.replace("blocks.", "h."): tensor for name, tensor in expected.items()} | {"ema.x": torch.zeros(3)}
    save_file(other, tmp_path / "b.safetensors")
    table = tmp_path / "names.yaml"
    table.write_text("h.*: blocks.*\nema.*: null\n")
    equal([filled_alone(str(tmp_path / "b.safetensors"), str(table))], expected)
    with pytest.raises(
        RankFailed, match=r"missing \(\d+\): blocks.0.* and \d+ more; left over \(\d+\): ema.x, h.0.* Type init_names"
    ):
        filled_alone(str(tmp_path / "b.safetensors"))


def test_all_that_does_not_fit_is_listed_before_a_tensor_changes(tmp_path: Path) -> None:
    tensors = trained(tied=False)
    first, second, *_ = tensors
    tensors[first] = tensors[first][:-1]
    tensors[second] = tensors[second].to(torch.int32)
    tensors["extra"] = torch.zeros(1)
    save_file(tensors, tmp_path / "a.safetensors")

    def refused(mesh: Mesh) -> tuple[str, bool]:
        model = small_gpt(**SIZES, tied=False)
        with pytest.raises(ForeignError) as caught:
            adopt(str(tmp_path / "a.safetensors"), TrainState(model), mesh)
        return str(caught.value), all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), trained(tied=False).values(), strict=True)
        )

    for text, untouched in on_mesh(refused, dp_shard=2):
        assert "left over (1): extra" in text
        assert f"of another shape (1): {first} is [25, 32] there, [26, 32] here" in text
        assert f"of another type (1): {second} is int32 there, float32 here" in text
        assert untouched


def test_pieces_that_leave_a_hole_are_refused(saved: Callable[[str], str]) -> None:
    weights = place.open_at(saved("dcp"))
    name, stored = next((name, one) for name, one in weights.tensors.items() if len(one.pieces) > 1)
    holed = replace(weights, tensors={**weights.tensors, name: replace(stored, pieces=stored.pieces[1:])})
    with pytest.raises(ForeignError, match=f"its pieces do not cover {name} exactly once"):
        fill(holed, {name: name}, {name: torch.zeros(stored.shape)})


def test_a_file_that_is_cut_off_while_it_is_read_is_told(tmp_path: Path) -> None:
    save_file({"x": torch.randn(50, 2)}, tmp_path / "a.safetensors")
    weights = place.open_at(str(tmp_path / "a.safetensors"))
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-8])
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ForeignError, match="it is cut off"):
            fill(weights, {"x": "x"}, {"x": torch.zeros(50, 2, dtype=dtype)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_of_a_local_file_are_read_alone_and_converted_in_parts(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.randn(40, 30).to(dtype)
    save_file({"x": whole}, tmp_path / "a.safetensors")
    stored, target = place.open_at(str(tmp_path / "a.safetensors")).tensors["x"], torch.zeros(40, 8)
    with mock.patch.object(adopting, "BUFFER", 46), mock.patch.object(store, "parts", lambda *_: pytest.fail("copied")):
        for column, part in ((3, target), (0, torch.zeros(40, 8))):
            box = (slice(0, 40), slice(column, column + 8))
            assert adopting._read_into(part, stored.pieces[0], stored.dtype, box)
            assert torch.equal(part, whole[box].float())
        rows = torch.zeros(20, 30)
        assert adopting._read_into(rows, stored.pieces[0], stored.dtype, (slice(5, 25), slice(0, 30)))
        assert torch.equal(rows, whole[5:25].float())


def test_a_ranged_read_gives_the_box_of_any_tensor(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number in range(60):
        shape = tuple(chance.randrange(1, 6) for _ in range(chance.randrange(5)))
        tensor = torch.randn(shape)
        if chance.random() < 0.5 and tensor.ndim > 1:
            tensor = tensor.transpose(0, -1)
        torch.save({"x": tensor}, tmp_path / f"{number}.pt")
        stored = place.open_at(str(tmp_path / f"{number}.pt")).tensors["x"]
        begins = [chance.randrange(size) for size in tensor.shape]
        box = tuple(slice(a, chance.randrange(a, n) + 1) for a, n in zip(begins, tensor.shape, strict=True))
        assert torch.equal(read(stored.pieces[0], stored.dtype, box), tensor[box])


@pytest.mark.campaign("network")
def test_object_storage_is_read_by_ranges(s3: str, saved: Callable[[str], str]) -> None:
    def load(mesh: Mesh) -> Any:
        for file in Path(saved("sharded")).iterdir():
            if mesh.rank == 0:
                store.write(f"{s3}/adopted/{file.name}", file.read_bytes())
        mesh.barrier()
        return filled(mesh, f"{s3}/adopted", tied=False)

    source = saved("sharded")
    assert source
    equal(on_mesh(load, dp_shard=2, tp=2), trained(tied=False))


@pytest.mark.campaign("network")
@pytest.mark.parametrize("degrees", [{"dp_shard": 4}, *SHARED], ids=str)
def test_the_server_of_a_bucket_counts_each_byte_once(
    degrees: dict[str, int], s3: str, s3_server: Server, tmp_path: Path
) -> None:
    """Through a proxy that counts them: all numbers are asked for by ranges, and all ranks together get them once."""
    large, place = {"tied": False, "vocab": 512, "width": 256, "hidden": 512}, f"counted{'-'.join(map(str, degrees))}"
    tensors = small_gpt(**SIZES | large).state_dict()
    shards(tmp_path, tensors)
    notes, files = tmp_path / "notes", {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    command = [sys.executable, str(Path(__file__).parents[1] / "counting_proxy.py"), str(s3_server.port), str(notes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout
        port = int(proxy.stdout.readline())

        def load(mesh: Mesh) -> Any:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            with mock.patch.dict(os.environ, s3_server.environment(port)):
                for name, data in files.items() if mesh.rank == 0 else ():
                    store.write(f"{s3}/{place}/{name}", data)
                mesh.barrier()
                parts = filled(mesh, f"{s3}/{place}", **large)
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            return parts

        try:
            equal(on_mesh(load, **degrees), tensors)
        finally:
            proxy.terminate()
    rows = [line.split("\t") for line in notes.read_text().splitlines()]
    asked = [(span, int(size)) for key, span, size in rows if key.endswith(".safetensors")]
    assert all(span.startswith("bytes=") for span, _ in asked)
    whole = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    assert whole <= sum(size for _, size in asked) <= 1.1 * whole


def filled_alone(source: str, table: Any = None) -> dict[str, tuple[Any, ...]]:
    (parts,) = on_mesh(lambda mesh: filled(mesh, source, table, tied=False))
    return parts  # type: ignore[no-any-return]
