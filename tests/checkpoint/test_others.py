"""The base of an adapter that others trained: found again by a digest of its numbers, on any mesh."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from adapted import MESHES, MORE, filled, part
from checkpoint.test_base import LORA, SMALL, dtrain, full, save, sharded, state_on
from pool import resident
from safetensors.torch import load_file, save_file
from small import PARTS, mesh_of

from dtrain.checkpoint.commit import find
from dtrain.errors import StoreError
from dtrain.mesh import Mesh

LAYOUTS: dict[str, tuple[Any, dict[str, int]]] = {"single": (PARTS["strategy"], {"dp_shard": 1}), **MESHES, **MORE}


def on(layout: str, work: Any, *arguments: Any) -> Any:
    strategy, degrees = LAYOUTS[layout]
    world = 1
    for degree in degrees.values():
        world *= degree
    return resident(world, partial(work, *arguments, strategy, degrees))[0]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model in two files, one tensor of which is bf16."""
    torch.manual_seed(5)
    arguments = {name: value for name, value in PARTS["model"].items() if name != "_target_"}
    tensors = {
        name: tensor.clone() for name, tensor in filled(**arguments | {"tied": False, "vocab": 13}).state_dict().items()
    }
    tensors["head.weight"] = tensors["head.weight"].bfloat16()
    folder = tmp_path / "theirs"
    folder.mkdir()
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def begin(source: str, out: str, word: str, strategy: Any, degrees: dict[str, int]) -> Any:
    """Begin an adapter and save it; its base, and the weights of the whole model."""
    with mesh_of(**degrees) as mesh:
        state = state_on(mesh, strategy, part(word), seed=3)
        checkpoint = sharded(mesh, Path(out))
        checkpoint.load_weights(source, state)
        state.step = 1
        save(checkpoint, state)
        return state.base, _weights(mesh, state)


def again(out: str, word: str, moved: str | None, strategy: Any, degrees: dict[str, int]) -> Any:
    with mesh_of(**degrees) as mesh:
        state = state_on(mesh, strategy, part(word), seed=4)
        state.moved = moved
        try:
            sharded(mesh, Path(out)).restore(state)
        except StoreError as error:
            return str(error)
        return state.base, _weights(mesh, state)


def _weights(mesh: Mesh, state: Any) -> dict[str, list[float]]:
    own = {name: full(tensor).flatten().tolist() for name, tensor in state.weights(of_base=True).items()}
    return {name: values for each in mesh.gather(own) for name, values in each.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_digest_is_that_of_one_process_and_any_mesh_goes_on(layout: str, base: Path, tmp_path: Path) -> None:
    one, weights = on("single", begin, str(base), str(tmp_path / "one"), "lora")
    assert one["url"] == str(base) and len(one["digest"]) == 64
    assert on(layout, begin, str(base), str(tmp_path / "two"), "dora") == (one, weights)
    assert on(layout, again, str(tmp_path / "one"), "lora", None) == (one, weights)


def test_a_base_that_moved_is_looked_for_and_a_changed_one_refused(base: Path, tmp_path: Path) -> None:
    one, weights = on("single", begin, str(base), str(tmp_path / "run"), "lora")
    ask = partial(on, "fsdp 2", again, str(tmp_path / "run"), "lora")
    moved = shutil.move(base, tmp_path / "moved")
    sentence = ask(None)
    assert sentence.startswith(f"cannot load the base of the adapter from {base}: ")
    assert "nothing is there" in sentence and "Bring it back (its digest begins with " in sentence
    assert ask(str(moved)) == ({**one, "url": str(moved)}, weights)
    shutil.move(moved, base)
    first = base / "model-00001-of-00002.safetensors"
    data = bytearray(first.read_bytes())
    data[-3] ^= 4
    first.write_bytes(data)
    for place in (None, str(base)):
        assert ": it was changed since: other numbers are there. Bring it back" in ask(place)
    data[-3] ^= 4
    first.write_bytes(data)
    tensors = load_file(base / "model-00002-of-00002.safetensors")
    save_file({name: value.double() for name, value in tensors.items()}, base / "model-00002-of-00002.safetensors")
    assert "it was changed since" in ask(None)


def test_a_checkpoint_holds_nothing_of_it(base: Path, tmp_path: Path) -> None:
    on("single", begin, str(base), str(tmp_path / "run"), "lora")
    _, commit = find(str(tmp_path / "run"))
    assert {name.rsplit(".", 1)[-1] for name in commit["tensors"]} == {"lora_A", "lora_B"}
    assert set(commit["facts"]["base"]) == {"url", "digest", "names", "tensors"}


def test_names_of_others_are_remembered_with_it(base: Path, tmp_path: Path) -> None:
    tensors = {name: value for file in base.glob("*.safetensors") for name, value in load_file(file).items()}
    theirs = {f"net.{name}".replace("blocks.", "h."): value for name, value in tensors.items()}
    save_file(theirs | {"extra": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "names.yaml").write_text("net.h.*: blocks.*\nnet.*: '*'\nextra: null\n")

    def tune(mesh: Mesh, table: str) -> Any:
        state = state_on(mesh, PARTS["strategy"], part("lora"), seed=3)
        checkpoint = sharded(mesh, tmp_path / "run")
        checkpoint.load_weights(str(tmp_path / "a.safetensors"), state, table)
        save(checkpoint, state)
        return state.base

    with mesh_of(dp_shard=1) as mesh:
        one = tune(mesh, str(tmp_path / "names.yaml"))
    (tmp_path / "names.yaml").unlink()
    assert one["names"] == {"net.h.*": "blocks.*", "net.*": "*", "extra": None}
    assert on("tp 2", again, str(tmp_path / "run"), "lora", None)[0] == one
    assert one["digest"] == on("single", begin, str(base), str(tmp_path / "other"), "lora")[0]["digest"]


def test_a_run_is_tuned_evaluated_and_merged_without_an_import(base: Path, tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith(("launcher", "strategy"))]
    assert "finished" in dtrain(tmp_path, *words, "steps=1", "out=whole")
    assert commands.run("checkpoint", "export", "out=whole", "to=theirs2", cwd=tmp_path).returncode == 0
    tuned = dtrain(
        tmp_path, *words, *LORA, "steps=3", "optim.lr=0.1", "out=a", "init=theirs2", "strategy=fsdp", "devices=2"
    )
    assert "finished after 3 steps" in tuned, tuned
    (last,) = [line for line in tuned.splitlines() if line.startswith("finished")]
    assert last.split("held-out loss ")[1].split(",")[0] in dtrain(tmp_path, "evaluate", "out=a")
    assert "model.safetensors" in dtrain(tmp_path, "checkpoint", "export", "out=a", "to=merged", "adapter=merged")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs2", "merged"))
    changed = [name for name, value in before.items() if not value.equal(after[name])]
    assert after.keys() == before.keys() and changed and all(name.startswith("blocks") for name in changed)
    data = bytearray((tmp_path / "theirs2/model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "theirs2/model.safetensors").write_bytes(data)
    for act in (("evaluate", "out=a"), ("checkpoint", "export", "out=a", "to=b", "adapter=merged")):
        assert "it was changed since: other numbers are there. Bring it back" in dtrain(tmp_path, *act)
    assert not list((tmp_path / "b").glob("*"))
