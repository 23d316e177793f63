"""dtrain's own models as models of transformers, which give the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_base import save, sharded
from small import PARTS, mesh_of, on_mesh
from torch import nn
from transformers import AutoModelForCausalLM

from dtrain.__main__ import main
from dtrain.build import build
from dtrain.checkpoint.leaving import leave, renamed
from dtrain.checkpoint.state import TrainState
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model.gpt import GPT
from dtrain.model.moe import MoE
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape

SIZES: dict[str, Any] = {"vocab": 40, "layers": 2, "heads": 4, "width": 48}
MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "gpt": (GPT, {"kv_heads": 2, "hidden": 80, "rope_base": 5e5}),
    "tied": (GPT, {"tied": True}),
    "moe": (MoE, {"experts": 4, "active": 2, "hidden": 24}),
    "shared": (MoE, {"experts": 4, "active": 1, "shared": 2, "hidden": 24, "kv_heads": 1, "tied": True}),
}


def made(kind: str) -> nn.Module:
    """Filled so that no weight is zero, and the bias of a router decides."""
    torch.manual_seed(3)
    factory, more = MODELS[kind]
    model = factory(**SIZES | more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.normal_(std=0.3)
    return model.eval()


def saved(model: nn.Module, out: Path) -> None:
    with mesh_of(dp_shard=1) as mesh:
        save(sharded(mesh, out), TrainState(model, None, None, None, None, step=1))


@pytest.mark.parametrize("kind", MODELS)
def test_the_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = made(kind)
    saved(model, tmp_path / "run")
    words = ["checkpoint", "export", f"out={tmp_path}/run", "as=transformers"]
    assert main([*words, f"to={tmp_path}/to"]) == main([*words, f"to={tmp_path}/cut", "shard=20KB"]) == 0
    tokens = torch.randint(0, 40, (3, 17))
    for place in ("to", "cut"):
        theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / place, output_loading_info=True)
        assert not any(info.values()), info
        assert theirs.config.model_type == ("glm4_moe" if "experts" in MODELS[kind][1] else "qwen3")
        difference = (theirs.eval()(tokens).logits - model(tokens)).abs().max().item()
        assert difference <= 1e-5 * model(tokens).abs().max().item(), difference
    assert (tmp_path / "cut/model.safetensors.index.json").exists()


@pytest.mark.parametrize("kind", ["gpt", "moe"])
def test_a_stage_of_a_pipeline_says_what_the_whole_is(kind: str) -> None:
    def facts(mesh: Mesh) -> Any:
        model = made(kind)
        parallelize(
            model, mesh, build(PARTS["strategy"]), precision=build(PARTS["precision"]), seed=0, pipeline=PipelineShape()
        )
        return TrainState(model).facts()["as_transformers"]

    whole = made(kind).as_transformers
    assert on_mesh(facts, pp=2) == [whole, whole]


def test_other_models_do_not_leave_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(nn.Linear(2, 2), tmp_path / "run")
    assert main(["checkpoint", "export", f"out={tmp_path}/run", f"to={tmp_path}/to", "as=transformers"]) == 2
    assert "as=transformers: the checkpoint is of no gpt or moe of dtrain. Leave as out." in capsys.readouterr().err
    assert main(["checkpoint", "export", f"out={tmp_path}/run", f"to={tmp_path}/to", "as=gguf"]) == 2
    told = (
        f"as=gguf: dtrain does not write it. Export without as, then type python convert_hf_to_gguf.py {tmp_path}/to of"
    )
    assert told in capsys.readouterr().err
    assert renamed("blocks.0.attention.gate.weight") is renamed("other") is None
    with pytest.raises(WordsError, match=r"blocks\.0\.x has no place in a qwen3"):
        leave({"blocks.0.x": None}, {"model_type": "qwen3"})  # type: ignore[dict-item]
