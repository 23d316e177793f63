"""The base of an adapter: its checkpoints hold what is trained and its moments, and name the base by URL and digest."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from adapted import DDP, MESHES, part
from pool import resident
from small import PARTS, mesh_of
from torch.distributed.tensor import DTensor

from dtrain.build import build
from dtrain.checkpoint.commit import find, write
from dtrain.checkpoint.sharded import Sharded
from dtrain.checkpoint.state import TrainState
from dtrain.errors import StoreError
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.optim.ema import EMA
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape

ADAMW = {"_target_": "dtrain.optim.adamw.build", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
MODEL = PARTS["model"] | {"tied": False}
LAYOUTS = {"single": (PARTS["strategy"], {"dp_shard": 1}), **MESHES}
SMALL = (
    "data=synthetic", "data.task=next_token", "objective=next_token", "data.sequence=16", "data.vocab=64", "model.layers=2", "model.heads=2",
    "model.width=32", "batch=4", "logger=[]", "hook=[]", "evaluate.samples=4", "strategy=single", "launcher=inline",
)  # fmt: skip
LORA = ("adapter=lora", "adapter.rank=4")


def state_on(mesh: Mesh, strategy: Any, adapter: Any, *, seed: int, ema: bool = False) -> TrainState:
    """A small model, filled from `seed`, with an adapter or none."""
    model = construct(MODEL, facts={"vocab": 13}, seed=seed, adapter=adapter)
    parallelize(model, mesh, build(strategy), precision=build(PARTS["precision"]), seed=seed, pipeline=PipelineShape())
    return TrainState(model, build(ADAMW, model=model), None, None, EMA(model, 0.9) if ema else None)


def train(state: TrainState, steps: int) -> None:
    """Steps on gradients that are a function of the parameter."""
    assert state.optimizer
    for step in range(steps):
        for parameter in state.model.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach() + 0.1 * (step + 1)
        state.optimizer.step()
        state.step += 1


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def whole(state: TrainState) -> dict[str, list[float]]:
    """Every tensor of the state, those of the base too."""
    tensors = state.tensors() | state.weights(of_base=True)
    return {name: full(tensor).flatten().tolist() for name, tensor in tensors.items()}


def sharded(mesh: Mesh, out: Path) -> Sharded:
    return Sharded(out=str(out), mesh=mesh, resume="auto", every=1, keep=None)


def save(checkpoint: Sharded, state: TrainState) -> None:
    checkpoint.save(state)
    checkpoint.wait()


def begin(folder: Path, word: str, layout: tuple[Any, dict[str, int]], *, ema: bool = False) -> dict[str, list[float]]:
    """A base saved by one rank's model, and an adapter on it saved after two steps on a mesh."""
    strategy, degrees = layout
    with mesh_of(**degrees) as mesh:
        base = state_on(mesh, strategy, None, seed=1)
        train(base, 2)
        save(sharded(mesh, folder / "base"), base)
        state = state_on(mesh, strategy, part(word), seed=2, ema=ema)
        sharded(mesh, folder / "adapter").load_weights(str(folder / "base"), state)
        for name, lengths in (
            (name, each) for name, each in state.model.named_parameters() if name.endswith("magnitude")
        ):
            weight = full(state.model.get_parameter(name.replace("magnitude", "weight")))
            assert torch.equal(full(lengths), torch.linalg.norm(weight, dim=1)), "those of the base"
        train(state, 2)
        save(sharded(mesh, folder / "adapter"), state)
        return whole(state)


def resume(folder: Path, word: str, layout: tuple[Any, dict[str, int]], *, ema: bool = False) -> dict[str, list[float]]:
    """The state of a new start on a mesh, whose model begins with other numbers."""
    strategy, degrees = layout
    with mesh_of(**degrees) as mesh:
        state = state_on(mesh, strategy, part(word), seed=3, ema=ema)
        assert sharded(mesh, folder / "adapter").restore(state)
        assert state.step == 2 and state.base
        return whole(state)


def on(layout: str, work: Any, *arguments: Any, **options: Any) -> dict[str, list[float]]:
    """What `work` returns on the ranks of a layout, of all stages."""
    strategy, degrees = LAYOUTS[layout]
    world = 1 if layout == "single" else 2
    runs = resident(world, partial(work, *arguments, (strategy, degrees), **options))
    return {name: values for run in runs for name, values in run.items()}


@pytest.mark.often("single-lora", "fsdp 2-dora", "tp 2-dora", "pp 2-lora")
@pytest.mark.parametrize("word", ["lora", "dora"])
@pytest.mark.parametrize("layout", ["single", "fsdp 2", "tp 2", "pp 2"])
def test_any_mesh_reads_what_any_other_wrote_bit_by_bit(word: str, layout: str, tmp_path: Path) -> None:
    written = on(layout, begin, tmp_path, word, ema=True)
    there = [other for other in ("single", "fsdp 2", "tp 2", "pp 2") if other != layout]
    for other in (layout, there[len(word + layout) % 3]):
        assert on(other, resume, tmp_path, word, ema=True) == written


def test_a_checkpoint_holds_nothing_of_the_base(tmp_path: Path) -> None:
    on("single", begin, tmp_path, "dora")
    _, commit = find(str(tmp_path / "adapter"))
    names = {name.rpartition(".")[2] for name in commit["tensors"] if name.startswith("model.")}
    assert names == {"lora_A", "lora_B", "magnitude"}
    base, there = find(str(tmp_path / "base"))
    assert commit["facts"]["base"]["url"] == base
    assert commit["facts"]["base"]["digest"] == json.loads((Path(base) / "COMMIT.json").read_text())["digest"]
    assert commit["facts"]["adapter"] == {"kind": "dora", "rank": 4, "alpha": 8, "dropout": 0.0}
    assert sum(file["size"] for file in commit["files"]) < sum(file["size"] for file in there["files"])


def refused(folder: Path, layout: tuple[Any, dict[str, int]], *, moved: str | None = None) -> str:
    with mesh_of(dp_shard=1) as mesh:
        state = state_on(mesh, PARTS["strategy"], part("lora"), seed=3)
        state.moved = moved
        try:
            sharded(mesh, folder / "adapter").restore(state)
        except StoreError as error:
            return str(error)
        return f"base: {state.base}"


def test_a_base_that_moved_or_changed_is_one_sentence_and_is_looked_for(tmp_path: Path) -> None:
    on("single", begin, tmp_path, "lora")
    base, commit = find(str(tmp_path / "base"))
    ask = partial(refused, tmp_path, LAYOUTS["single"])
    shutil.move(tmp_path / "base", tmp_path / "moved")
    sentence = ask()
    assert sentence.startswith(
        f"cannot load the base of the adapter from {base}: it is damaged, or not there any more. "
    )
    assert "Bring it back (its digest begins with " in sentence and "train on with init=<where it is now>" in sentence
    assert f"'url': '{tmp_path / 'moved'}" in ask(moved=str(tmp_path / "moved"))
    other = tmp_path / "other"
    with mesh_of(dp_shard=1) as mesh:
        save(sharded(mesh, other), state_on(mesh, PARTS["strategy"], None, seed=7))
    assert f"and is not at {other} either" in ask(moved=str(other))
    shutil.move(tmp_path / "moved", tmp_path / "base")
    Path(base, "COMMIT.json").unlink()
    write(base, commit | {"world": 7})
    assert ": it was changed since. Bring it back" in ask()


def test_a_base_whose_bytes_were_changed_is_refused(tmp_path: Path) -> None:
    on("single", begin, tmp_path, "lora")
    base, _ = find(str(tmp_path / "base"))
    (file,) = Path(base).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "its bytes are not those that were saved" in refused(tmp_path, LAYOUTS["single"])


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    on("single", begin, tmp_path, "lora")
    with (
        mesh_of(dp_shard=1) as mesh,
        pytest.raises(StoreError, match=r"it holds an adapter \(lora\), not a model. Type adapter=lora and"),
    ):
        state = state_on(mesh, PARTS["strategy"], None, seed=3)
        sharded(mesh, tmp_path / "new").load_weights(str(tmp_path / "adapter"), state)


def test_an_adapter_goes_on_from_another_one(tmp_path: Path) -> None:
    written = on("single", begin, tmp_path, "lora")
    with mesh_of(dp_shard=1) as mesh:
        state = state_on(mesh, DDP, part("lora"), seed=3)
        sharded(mesh, tmp_path / "new").load_weights(str(tmp_path / "adapter"), state)
        assert state.base == find(str(tmp_path / "adapter"))[1]["facts"]["base"]
        of_model = {name: values for name, values in written.items() if name.startswith("model.")}
        assert whole(state) == of_model


@pytest.mark.parametrize("word", ["lora", "dora"])
def test_bytes_are_three_times_the_adapters_and_one_percent(word: str, tmp_path: Path) -> None:
    """Of matrices as real ones are: 32 x 1024 numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    build(part(word, targets=["*"], rank=32))(model)
    state = TrainState(model, build(ADAMW, model=model))
    state.base = {"url": "somewhere", "digest": "0"}
    train(state, 1)
    with mesh_of(dp_shard=1) as mesh:
        save(sharded(mesh, tmp_path), state)
    adapter = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 3 * adapter * 1.01


def dtrain(folder: Path, *words: str) -> str:
    done = commands.run(*words, cwd=folder)
    return done.stdout + done.stderr


def rows(folder: Path) -> list[Any]:
    kept = ("step", "loss", "norm", "lr")
    return [
        {key: row[key] for key in kept} for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    ]


@pytest.mark.often("fsdp 2")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("mesh", [(), ("devices=2", "strategy=fsdp", "launcher=local")], ids=["single", "fsdp 2"])
def test_a_run_resumes_bitwise_and_is_evaluated_without_further_words(mesh: tuple[str, ...], tmp_path: Path) -> None:
    assert "finished" in dtrain(tmp_path, *SMALL, "steps=3", "out=base")
    words = (*SMALL, *LORA, "init=base", "steps=6", *mesh)
    straight, first, then = (
        dtrain(tmp_path, *words, *more) for more in (("out=a",), ("out=b", "stop_after=3"), ("out=b",))
    )
    assert "finished after 6 steps" in straight and "finished after 6 steps" in then, first + then
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    ends = [find(str(tmp_path / name))[1]["files"] for name in "ab"]
    held = [
        path.read_bytes()[-4096:]
        for name in "ab"
        for path in sorted((tmp_path / name).rglob("step-00000006/*/*.safetensors"))
    ]
    assert [file["size"] for file in ends[0]] == [file["size"] for file in ends[1]]
    assert held[: len(held) // 2] == held[len(held) // 2 :]
    (last,) = [line for line in straight.splitlines() if line.startswith("finished")]
    assert last.split("held-out loss ")[1].split(",")[0] in dtrain(tmp_path, "evaluate", "out=a")
    assert last.split("held-out loss ")[1].split(",")[0] in dtrain(tmp_path, "evaluate", "init=b")


def test_without_a_base_it_is_refused_before_it_starts(tmp_path: Path) -> None:
    said = dtrain(tmp_path, *SMALL, *LORA, "steps=3", "out=a")
    assert "adapter: it is trained on weights. Type init=<the URL of a run or checkpoint>, or adapter=none." in said
    assert not (tmp_path / "a").exists()
