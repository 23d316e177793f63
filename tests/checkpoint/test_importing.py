"""Weights of others as a checkpoint of dtrain, and out again as they came."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from dtrain.__main__ import main
from dtrain.checkpoint import commit as commits
from dtrain.checkpoint import importing, snapshot, survey
from dtrain.errors import StoreError
from dtrain.storage import attempts
from dtrain.weights import ForeignError


@pytest.mark.campaign("documents")
def test_what_was_imported_is_exported_bit_for_bit_for_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "hf", max_shard_size="12KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert main(["checkpoint", "import", str(tmp_path / "hf"), f"to={tmp_path}/run"]) == 0
    assert "a sharded folder of Hugging Face" in capsys.readouterr().out
    assert main(["checkpoint", "verify", f"out={tmp_path}/run"]) == 0
    assert main(["checkpoint", "export", f"out={tmp_path}/run", f"to={tmp_path}/out"]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    tokens = torch.arange(7)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert main(["checkpoint", "export", f"out={tmp_path}/run", f"to={tmp_path}/shards", "shard=12KB"]) == 0
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) >= 4
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "shards").eval()
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert main(["checkpoint", "import", f"{tmp_path}/shards", f"to={tmp_path}/again"]) == 0
    assert main(["checkpoint", "export", f"out={tmp_path}/run", f"to={tmp_path}/shards", "shard=1GB"]) == 3


def test_large_tensors_are_cut_and_shared_ones_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot.pack, "__defaults__", (200,))
    shared, large = torch.randn(3, 2), torch.randn(20, 7).t()
    tensors = {"module.a": shared, "module.b": shared, "module.large": large, "module.none": torch.zeros(0, 3)}
    torch.save(tensors, tmp_path / "a.pt")
    url, _, ours = importing.import_weights(str(tmp_path / "a.pt"), str(tmp_path / "run"))
    commit = commits.read(url)
    assert list(ours) == ["a", "large", "none"]
    assert commit["facts"]["tied"] == {"b": "a"}
    assert len(commit["files"]) > 2
    assert not list(survey.faults(url, commit))
    main(["checkpoint", "export", f"out={tmp_path}/run", f"to={tmp_path}/out"])
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written["large"], large)
    assert torch.equal(written["a"], shared)
    assert written["none"].shape == (0, 3)


def test_a_table_names_the_tensors_and_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"h.a": torch.zeros(2), "ema.a": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "names.yaml").write_text("h.*: '*'\nema.*: null\n")
    words = [str(tmp_path / "x.safetensors"), f"to={tmp_path}/run", f"names={tmp_path}/names.yaml"]
    assert main(["checkpoint", "import", *words]) == 0
    assert "(without ema.a)" in capsys.readouterr().out
    noted = yaml.safe_load((tmp_path / "run" / attempts.IMPORTED).read_text())
    assert (noted["kind"], noted["names"]) == ("a safetensors file", f"{tmp_path}/names.yaml")
    with pytest.raises(StoreError, match=r"it holds checkpoints, imported\.yaml already\. Type to="):
        importing.import_weights(str(tmp_path / "x.safetensors"), str(tmp_path / "run"))
    with pytest.raises(ForeignError, match=r"q\.\* matches no name there"):
        importing.import_weights(str(tmp_path / "x.safetensors"), str(tmp_path / "other"), {"q.*": "x"})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["a"], "needs a place and to"),
        (["to=b"], "needs a place and to"),
        (["a", "to=b", "nmes=c"], "nmes: checkpoint import does not take it. Did you mean names?"),
        (["nothing-there", "to=b"], "cannot find a checkpoint at nothing-there: nothing is there"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "import", *words]) in (2, 3)
    error = capsys.readouterr().err
    assert cause in error
    assert len(error.splitlines()) == 1


def test_an_import_that_was_broken_off_is_done_by_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(commits, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            importing.import_weights(str(tmp_path / "x.safetensors"), str(tmp_path / "run"))
    with pytest.raises(StoreError, match=r"its import was broken off\. Type dtrain checkpoint import again"):
        commits.find(str(tmp_path / "run"))
    url, _, _ = importing.import_weights(str(tmp_path / "x.safetensors"), str(tmp_path / "run"))
    assert commits.find(str(tmp_path / "run"))[0] == url
