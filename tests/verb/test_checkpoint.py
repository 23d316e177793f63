"""What the command says of checkpoints at a URL, and what it makes of them for others; whatever lies there, nothing of it is run."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import ranks
from safetensors import safe_open
from safetensors.torch import load_file
from small import PARTS, STRATEGIES, on_mesh, tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.__main__ import main
from dtrain.build import build
from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.sharded import Sharded
from dtrain.checkpoint.state import TrainState
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.optim.ema import EMA
from dtrain.parallel.order import parallelize
from dtrain.storage import lease, store

ADAMW = {"_target_": "dtrain.optim.adamw.build", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
FSDP = STRATEGIES["fsdp"]


def llama() -> nn.Module:
    """A tiny one whose head is its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=29, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True, **sizes)
    )


def save(mesh: Mesh, out: str, model: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """A checkpoint after each of `steps` steps; the whole weights and averages at the end."""
    made = construct(model, facts={"vocab": 13}, seed=0)
    parallelize(made, mesh, build(FSDP), precision=build(PARTS["precision"]), seed=0)
    ema = EMA(made, 0.5)
    state = TrainState(made, build(ADAMW, model=made), None, None, ema)
    checkpoint = Sharded(out=out, mesh=mesh, resume="auto", every=1, keep=None)
    for step in range(steps):
        for parameter in made.parameters():
            parameter.grad = torch.ones_like(parameter) * (step + 1) * 0.1 + parameter.detach()
        state.optimizer.step()
        ema.update()
        state.step += 1
        checkpoint.save(state)
        checkpoint.wait()
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).tolist()
        for name, t in state.tensors().items()
        if name[:6] != "optim."
    }


def saved(out: Any, model: dict[str, Any] = PARTS["model"], world: int = 2) -> dict[str, Tensor]:
    whole = on_mesh(lambda mesh: save(mesh, str(out), model), dp_shard=world)[0]
    return {name: torch.tensor(values) for name, values in whole.items()}


def newest(out: Path) -> Path:
    return Path(commits.find(str(out))[0])


def dtrain(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["checkpoint", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """(a run of two checkpoints from two ranks, its weights)."""
    out = tmp_path_factory.mktemp("trained") / "run"
    return out, saved(out)


@pytest.fixture
def out(trained: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run"


def test_an_export_names_the_tied_weights_that_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**PARTS["model"], "tied": True}
    saved(tmp_path / "run", model)
    code, output = dtrain(capsys, "export", f"out={tmp_path}/run", f"to={tmp_path}/file")
    assert code == 0 and "(head.weight is tied to embed.weight and left out: " in output
    weights = load_file(tmp_path / "file/model.safetensors")
    made = construct(model, facts={"vocab": 13}, seed=0)
    missing, unexpected = made.load_state_dict(weights, strict=False, assign=True)
    assert (missing, unexpected) == (["head.weight"], [])


def test_ls_tells_valid_damaged_and_uncommitted_ones_apart(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = newest(out)
    (first / "METRICS.json").write_text('{"eval_loss": 1.25}')
    shutil.copytree(first.parent, out / "checkpoints/step-00000003")
    torn = next((out / "checkpoints/step-00000003").iterdir())
    (torn / "COMMIT.json").write_text("{")
    shutil.copytree(first.parent, out / "checkpoints/step-00000004")
    (next((out / "checkpoints/step-00000004").iterdir()) / "COMMIT.json").unlink()
    code, output = dtrain(capsys, "ls", f"out={out}")
    lines = output.splitlines()
    assert code == 0
    states = {line.split()[0]: line.split()[2] for line in lines[1:5]}
    assert states == {"4": "uncommitted", "3": "damaged", "2": "valid", "1": "valid"}
    valid = next(line for line in lines if line.startswith("2 "))
    assert (
        first.name in valid
        and "2 rank(s) dp_shard=2" in valid
        and "eval_loss 1.25" in valid
        and "newest" in valid
        and "ago" in valid
    )
    assert "step 3: cannot read the commit" in output
    assert "sizes" in lines[-1] and "checkpoint verify" in lines[-1], "that the bytes are not checked"
    for place in (first.parent, first):
        assert dtrain(capsys, "ls", f"out={place}")[1].count(" valid ") == 1


def test_folders_of_a_run_without_checkpoints_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lease.hold(str(tmp_path)):
        pass
    code, output = dtrain(capsys, "ls", f"out={tmp_path}")
    assert code and "lease" not in output


def test_a_stray_commit_or_shard_beside_the_checkpoints_hides_none(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = newest(out)
    for folder in (out, attempt.parent):
        (folder / "COMMIT.json").write_text("{}")
        shutil.copy(next(attempt.glob("*.safetensors")), folder)
    assert dtrain(capsys, "ls", f"out={out}")[1].count(" valid ") == 2
    assert "2 checked, 0 damaged" in dtrain(capsys, "verify", f"out={out}")[1]
    assert newest(out) == newest(attempt.parent) == newest(attempt) == attempt
    for place in (attempt.parent, attempt):
        assert "1 checked, 0 damaged" in dtrain(capsys, "verify", f"out={place}")[1]


def test_verify_names_every_damaged_file(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = dtrain(capsys, "verify", f"out={out}")
    assert code == 0 and output.count("whole ") == 2 and "0 damaged" in output
    files = sorted(newest(out).glob("*.safetensors"))
    for path in files:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    code, output = dtrain(capsys, "verify", f"out={out}")
    assert code == 1 and "1 damaged" in output
    assert all(str(path) in output for path in files) and len(files) == 2
    assert dtrain(capsys, "verify", f"out={out}", "step=1")[0] == 0
    files[0].unlink()
    assert dtrain(capsys, "verify", f"out={newest(out).parent.parent.parent}", "step=2")[0] == 1


def test_nothing_there_is_one_line(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["ls", f"out={tmp_path}/none"],
        ["verify", f"out={out}", "step=77"],
        ["export", f"out={tmp_path}/none", f"to={tmp_path}/to"],
    ):
        code, output = dtrain(capsys, *words)
        assert code == 3 and output.count("\n") == 1, output


def test_wrong_words_are_told_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert dtrain(capsys)[0] == dtrain(capsys, "lss")[0] == 2
    code, output = dtrain(capsys, "export", "weights=emma", "dtype=f8", "stepp=3", "step=x", "out=a")
    assert code == 2
    for part in (
        "weights=emma: Did you mean ema?",
        "dtype=f8:",
        "stepp: checkpoint export does not take it. Did you mean step?",
        "step=x",
        "Type to=<URL>",
    ):
        assert part in output, output


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_export_gives_the_numbers_of_the_run(
    trained: tuple[Path, dict[str, Tensor]], weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = trained
    code, output = dtrain(capsys, "export", f"out={out}", f"to={tmp_path}/to", f"weights={weights}")
    assert code == 0 and "no config.json" in output
    weights_read = load_file(tmp_path / "to/model.safetensors")
    assert weights_read.keys() == {name.removeprefix("model.") for name in whole if name.startswith("model.")}
    assert all(
        torch.equal(tensor, whole.get(f"{weights}.{name}", whole[f"model.{name}"]))
        for name, tensor in weights_read.items()
    )
    with safe_open(tmp_path / "to/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_export_changes_the_type_when_asked_and_takes_the_step_that_is_named(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = trained
    assert dtrain(capsys, "export", f"out={out}", f"to={tmp_path}/to", "dtype=bf16")[0] == 0
    for name, tensor in load_file(tmp_path / "to/model.safetensors").items():
        assert torch.equal(tensor, whole[f"model.{name}"].bfloat16())
    assert dtrain(capsys, "export", f"out={out}", f"to={tmp_path}/one", "step=1")[0] == 0
    assert not torch.equal(load_file(tmp_path / "one/model.safetensors")["norm.weight"], whole["model.norm.weight"])


@pytest.mark.parametrize("to", ["", "{out}", "{out}/", "{out}/checkpoints", "{out}/checkpoints/step-00000002"])
def test_export_writes_neither_nowhere_nor_where_the_run_does(
    to: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(out.rglob("*"))
    code, output = dtrain(capsys, "export", f"out={out}", f"to={to.format(out=out)}")
    assert code == 2 and "Type to=<" in output
    assert sorted(out.rglob("*")) == before


def test_export_overwrites_nothing_and_leaves_nothing_that_looks_complete(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to/model.safetensors").write_text("mine")
    code, output = dtrain(capsys, "export", f"out={out}", f"to={tmp_path}/to")
    assert (
        code == 3 and "Type to=<another place>" in output and (tmp_path / "to/model.safetensors").read_text() == "mine"
    )
    path = sorted(newest(out).glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    code, output = dtrain(capsys, "export", f"out={out}", f"to={tmp_path}/other", "step=2")
    assert code == 3 and path.name in output and not (tmp_path / "other/model.safetensors").exists()


@pytest.mark.parametrize("bytes_left", [100, -1], ids=["cut", "changed"])
def test_export_names_a_damaged_newest_checkpoint_and_takes_the_older_one(
    bytes_left: int, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sorted(newest(out).glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:bytes_left] + b"\0" * (bytes_left < 0))
    code, output = dtrain(capsys, "export", f"out={out}", f"to={tmp_path}/to")
    assert code == 0 and (tmp_path / "to/model.safetensors").exists()
    (note,) = [line for line in output.splitlines() if line.startswith("note: ")]
    assert str(path.parent) in note and path.name in note and "Step 1 is used" in note


def test_a_checkpoint_that_lies_is_one_line(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes for which there are no bytes, files outside, types that are none."""
    place = newest(out)
    original = json.loads((place / "COMMIT.json").read_text())

    def lie(change: Any) -> None:
        commit = json.loads(json.dumps(original))
        commit.pop("digest")
        change(commit)
        digest = hashlib.sha256(json.dumps(commit, sort_keys=True).encode()).hexdigest()
        (place / "COMMIT.json").write_text(json.dumps({**commit, "digest": digest}))

    def huge(commit: dict[str, Any]) -> None:
        commit["tensors"]["model.huge"] = {"shape": [1 << 50], "dtype": "torch.float32"}
        commit["pieces"].append(
            {"name": "model.huge", "key": "x", "file": commit["files"][0]["name"], "shape": [1 << 50], "offset": [0]}
        )

    def outside(commit: dict[str, Any]) -> None:
        commit["files"][0]["name"] = "../../../plan.yaml"

    def no_type(commit: dict[str, Any]) -> None:
        commit["tensors"]["model.norm.weight"]["dtype"] = "torch.nn.Module"

    for change in (huge, outside, no_type):
        lie(change)
        code, output = dtrain(capsys, "export", f"out={place}", f"to={tmp_path}/to")
        assert code == 3 and output.count("\n") == 1, output
        assert dtrain(capsys, "verify", f"out={place}")[0] == 1
    assert not (tmp_path / "to").exists()


def test_a_model_of_transformers_is_loaded_by_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    whole = saved(tmp_path / "run", {"_target_": f"{__name__}.llama"})
    assert dtrain(capsys, "export", f"out={tmp_path}/run", f"to={tmp_path}/hf")[0] == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    mine = llama()
    missing = mine.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in whole.items() if name.startswith("model.")},
        strict=False,
    )
    assert missing.missing_keys == ["lm_head.weight"], "tied: written once"
    batch = tokens(2, 9, vocab=29)
    assert loaded(batch, labels=batch).loss.item() == mine(batch, labels=batch).loss.item()
    assert type(loaded).__name__ == "LlamaForCausalLM" and loaded.lm_head.weight is loaded.model.embed_tokens.weight


def on_storage(out: str, folder: str) -> dict[str, Any]:
    """From two ranks to a bucket, then all the verbs, there and back."""
    whole = save_here(out)
    codes = [main(["checkpoint", "ls", f"out={out}"]), main(["checkpoint", "verify", f"out={out}"])]
    codes.append(main(["checkpoint", "export", f"out={out}", f"to={out}/hf"]))
    codes.append(main(["checkpoint", "export", f"out={out}", f"to={out}/hf"]))
    store.download(f"{out}/hf/model.safetensors", Path(folder) / "model.safetensors")
    return {"codes": codes, "whole": whole}


def save_here(out: str) -> dict[str, Any]:
    from small import mesh_of

    with mesh_of(dp_shard=int(os.environ["WORLD_SIZE"])) as mesh:
        return save(mesh, out, PARTS["model"])


def test_shards_hold_what_one_file_does(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("one", []), ("shards", ["shard=1KB"])):
        assert main(["checkpoint", "export", f"out={out}", f"to={tmp_path}/{name}", *words]) == 0
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert {*index["weight_map"].values()} == {file.name for file in files}
    whole, parts = load_file(tmp_path / "one/model.safetensors"), dict[str, Tensor]()
    for file in files:
        parts |= load_file(file)
    assert parts.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    capsys.readouterr()
    assert main(["checkpoint", "export", f"out={out}", f"to={tmp_path}/no", "shard=many"]) == 2
    assert capsys.readouterr().err == "dtrain: shard=many: it is no size. Type shard=5GB.\n"


def test_object_storage_is_as_good(s3: str, tmp_path: Path) -> None:
    answer = ranks(1, on_storage, f"{s3}/verb", str(tmp_path))[0]
    assert answer["codes"] == [0, 0, 0, 3]
    weights_read = load_file(tmp_path / "model.safetensors")
    assert all(tensor.tolist() == answer["whole"][f"model.{name}"] for name, tensor in weights_read.items())
