"""Checks of what a run begins with: weights of others, and the address at which nodes join, are looked at before any
rank starts.
"""

import json
from pathlib import Path

import commands
import pytest
import torch
from launching import plan_of
from safetensors.torch import load_file, save_file

from dtrain.__main__ import main
from dtrain.cluster import network
from dtrain.launcher import preflight


def told(tmp_path: Path, *words: str) -> list[str]:
    return [problem for problem in preflight.missing(plan_of(tmp_path / "out", *words)) if "init" in problem]


def test_weights_of_others_are_refused_before_launch(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    good = f"init={tmp_path}/a.safetensors"
    assert told(tmp_path, good) == []
    assert told(tmp_path, good, "init_names={'layer.*': 'body.*'}") == []
    (fault,) = told(tmp_path, good, "init_names={'x.*': 'y.*'}")
    assert "init_names: x.* matches no name there that an earlier line leaves" in fault
    assert "layer.weight" in fault
    (fault,) = told(tmp_path, f"init={tmp_path}/a.safetensor")
    assert fault.endswith(f"nothing is there. Did you mean {tmp_path}/a.safetensors?")
    (fault,) = told(tmp_path, good, "init_names=none.yaml")
    assert "cannot read none.yaml" in fault
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/zero_to_fp32.py").touch()
    (fault,) = told(tmp_path, f"init={tmp_path}/deepspeed")
    assert f"Type python {tmp_path}/deepspeed/zero_to_fp32.py" in fault


def test_a_size_that_pretrained_weights_do_not_have_is_told_with_what_to_type(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 500, "n_head": 4}))
    words = "objective=next_token", "model=hf", f"model.name={tmp_path}", "model.config={vocab_size: 600, n_head: 2}"
    (fault,) = [each for each in preflight.missing(plan_of(tmp_path / "out", *words)) if "model.config" in each]
    assert fault == (
        f"model.config={{vocab_size: 600}}: the pretrained weights at {tmp_path} have vocab_size: 500. Leave vocab_size "
        "out, or type model.weights=random."
    )
    for other in ("model.weights=random", "model.config={vocab_size: 500}"):
        assert not any("model.config" in each for each in preflight.missing(plan_of(tmp_path / "out", *words, other)))


def test_a_model_whose_folder_has_no_weights_is_told_by_the_word_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    sizes = {"vocab_size": 256, "n_embd": 8, "n_layer": 1, "n_head": 2}
    Path("tiny/config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    words = ["objective=next_token", "model=hf", "model.name=tiny", "data=synthetic", "data.sequence=16"]
    sentence = (
        "model.name=tiny: cannot find a checkpoint in tiny: it holds config.json. Type model.name=<a folder with "
        "weights, or <organisation>/<name> of the Hugging Face hub>, or model.weights=random to begin with random "
        "weights."
    )
    assert sentence in preflight.missing(plan_of(tmp_path / "out", *words))
    assert main(["plan", *words]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *words, "model.weights=random"]) == 0
    assert "cannot find" not in capsys.readouterr().out


def test_a_model_that_is_known_by_a_short_name_is_told_with_that_of_the_hub(tmp_path: Path) -> None:
    words = "objective=next_token", "model=hf", "model.name=gpt2", "data=synthetic", "data.sequence=16"
    (fault,) = [each for each in preflight.missing(plan_of(tmp_path / "out", *words)) if "model.name" in each]
    assert fault.endswith("On the hub it is openai-community/gpt2.")


def test_no_advice_about_an_adapter_without_weights_is_refused_itself(tmp_path: Path) -> None:
    Path(tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 256, "n_embd": 8}))
    words = "objective=next_token", "model=hf", f"model.name={tmp_path}", "data=synthetic", "data.sequence=16"

    def refused(*more: str) -> str:
        problems = preflight.missing(plan_of(tmp_path / "out", *words, "adapter=lora", *more))
        return next(each for each in problems if each.startswith("model."))

    assert refused().endswith("of the Hugging Face hub>, or init=<a run or weights>: an adapter is trained on them.")
    assert refused("model.weights=random") == (
        "model.weights=random: an adapter is trained on weights that exist. Leave model.weights out and type "
        "model.name=<a folder with weights>, or type init=<a run or weights>, or adapter=none."
    )
    save_file({"layer.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert refused("model.config={n_embd: 16}").endswith("have n_embd: 8. Leave n_embd out.")


def test_a_run_of_dtrain_takes_no_table(tmp_path: Path) -> None:
    attempt = tmp_path / "a/checkpoints/step-00000001/00000001-20260101T000000-0123abcd-0001"
    attempt.mkdir(parents=True)
    (attempt / "COMMIT.json").touch()
    (fault,) = told(tmp_path, f"init={tmp_path}/a", "init_names={'x': 'y'}")
    assert "is a run of dtrain, with the names of its own model. Leave it out." in fault


@pytest.mark.often("*fsdp*")
@pytest.mark.campaign("documents")
@pytest.mark.parametrize("words", [[], ["strategy=fsdp", "devices=2"]], ids=str)
def test_a_run_begins_with_the_weights_bit_for_bit(words: list[str], tmp_path: Path) -> None:
    """From a file, and from what was imported from it; neither is changed before the first step."""
    small = [
        "steps=1", "model.layers=1", "model.width=32", "model.heads=2", "data.sequence=16", "hook=[]", "logger=[]",
        "evaluate.samples=8", "on_spike=rewind", "checkpoint.keep=null", *words,
    ]  # fmt: skip
    first = commands.run(*small, f"out={tmp_path}/first")
    assert first.returncode == 0, first.stderr
    commands.run("checkpoint", "export", f"out={tmp_path}/first", f"to={tmp_path}/hf")
    expected = load_file(tmp_path / "hf/model.safetensors")
    imported = commands.run("checkpoint", "import", f"{tmp_path}/hf", f"to={tmp_path}/imported")
    assert imported.returncode == 0, imported.stderr
    for name in ("hf", "imported"):
        done = commands.run(*small, f"init={tmp_path}/{name}", f"out={tmp_path}/{name}-run", "seed=5")
        assert done.returncode == 0, done.stderr
        commands.run("checkpoint", "export", f"out={tmp_path}/{name}-run", f"to={tmp_path}/{name}-out", "step=0")
        begun = load_file(tmp_path / f"{name}-out/model.safetensors")
        assert begun.keys() == expected.keys()
        assert all(torch.equal(tensor, begun[key]) for key, tensor in expected.items())
    again = commands.run(*small, f"out={tmp_path}/imported")
    assert again.returncode == 3
    assert "holds weights that were imported" in again.stderr
    assert json.loads((tmp_path / "hf-run/result.json").read_text())["status"] == "finished"


SSH = ("nodes=2", "batch=8", "launcher=ssh", "launcher.hosts=[a,b]")


def problems(out: Path, *words: str) -> str:
    return "\n".join(preflight.missing(plan_of(out, *words)))


@pytest.mark.skipif(network.is_loopback(network.outward()), reason="this host has no other address than loopback")
def test_an_engine_makes_the_secret_of_an_address_that_others_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"launcher.address={network.outward()}"
    monkeypatch.delenv("DTRAIN_SECRET", raising=False)
    assert problems(tmp_path, *SSH, address) == ""
    assert "DTRAIN_SECRET is not set" in problems(
        tmp_path, "nodes=2", "batch=8", "launcher=local", "launcher.here=1", address
    )
    monkeypatch.setenv("DTRAIN_SECRET", "short")
    assert "DTRAIN_SECRET has 5 characters and can be guessed" in problems(tmp_path, *SSH, address)


@pytest.mark.parametrize("address", ["x y", "example.invalid:29400", "192.0.2.77", f"{'a' * 70}:1"])
def test_what_is_no_address_of_this_host_is_refused_unless_it_is_one_of_a_job(address: str, tmp_path: Path) -> None:
    said = problems(tmp_path, *SSH, f"launcher.address='{address}'")
    assert said.startswith(f"launcher.address={address}: this host has no such address (") and "DTRAIN" not in said
    slurm = ("nodes=2", "batch=8", "launcher=slurm", f"launcher.address='{address}'")
    assert "launcher.address" not in problems(tmp_path, *slurm)
