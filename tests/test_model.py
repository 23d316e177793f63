"""Models of every kind are built, trained and saved on every strategy, or refused before their first step with the reason; what depends on the mesh is said."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pool import RankFailed, resident
from safetensors.torch import load_file
from small import plan
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtrain.__main__ import main
from dtrain.errors import WordsError
from dtrain.model import caveats, construct, evaluating
from dtrain.train import train

FEATURES = "data=synthetic objective=regression data.samples=64 batch=8 steps=4 schedule.warmup=0 optim.eps=1e-5 logger=[] hook=[] trust=[strange]"
TOKENS = "data=synthetic objective=next_token data.vocab=29 data.sequence=8 data.samples=64 batch=8 steps=4 optim.eps=1e-5 logger=[] hook=[] trust=[strange]"


def trained(words: str, out: Path) -> tuple[float, float]:
    """The last loss and the held-out one."""
    asked = plan(*words.split(), f"out={out}")
    result = resident(asked.world, train, asked)[0]
    assert result.step == (asked.stop_after or asked.steps) and result.loss is not None
    return result.loss, result.metrics.get("eval_loss", 0.0)


@pytest.mark.often("ddp-Complex-*", "ddp-Mixed-*", "ddp-Sparse-*", "fsdp-Empty-*", "fsdp-Double-*")
@pytest.mark.parametrize(
    ("model", "words"),
    [(name, FEATURES) for name in ("Complex", "Empty", "Double", "Mixed")] + [("Sparse", TOKENS)],
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_odd_parameters_train_as_in_one_process(model: str, words: str, strategy: str, tmp_path: Path) -> None:
    """Or are refused by their names. Stopped half way and gone on with, in another layout."""
    words = f"model._target_=strange.{model} {words}"
    whole = trained(f"{words} devices=1", tmp_path / "whole")
    split = f"{words} strategy={strategy} devices=2 ema=0.9"
    if strategy == "fsdp" and model in ("Complex", "Mixed"):
        with pytest.raises(
            RankFailed,
            match=r"strategy=fsdp: spectrum holds complex numbers|inner.*are gathered together but have different dtypes",
        ):
            trained(split, tmp_path / "split")
        return
    assert trained(split, tmp_path / "split") == pytest.approx(whole, rel=2e-6)
    trained(f"{words} devices=1 stop_after=2", tmp_path / "both")
    assert trained(f"{words} strategy={strategy} devices=2", tmp_path / "both") == pytest.approx(whole, rel=2e-6)


def test_complex_numbers_are_exported(tmp_path: Path) -> None:
    trained(f"model._target_=strange.Complex {FEATURES} devices=1", tmp_path / "run")
    assert main(["checkpoint", "export", f"out={tmp_path}/run", f"to={tmp_path}/there", "dtype=bf16"]) == 0
    saved = load_file(tmp_path / "there" / "model.safetensors")
    assert saved["spectrum"].dtype == torch.complex64 and saved["spectrum"].imag.abs().max() > 0
    assert saved["out.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "words", "why"),
    [
        ("Lazy", FEATURES, r"out\.weight of Lazy has no shape yet, it belongs to a lazy module"),
        ("Frozen", FEATURES, "Frozen has parameters, but none that is trained"),
        ("Wide", FEATURES, "spectrum of Wide is complex128"),
        ("SparseByHand", TOKENS, r"a parameter \[29, 16\] is sparse.*without sparse=True"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(model: str, words: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=rf"(?s)WordsError: model: .*{why}"):
        trained(f"model._target_=strange.{model} {words} devices=1", tmp_path)


@pytest.mark.parametrize(
    ("part", "facts", "why"),
    [
        (
            {"inputs": [3, 4, 4]},
            {"inputs": [1, 8, 8]},
            r"model\.inputs=\[3, 4, 4\]: a sample of the data has the shape \[1, 8, 8\]",
        ),
        ({"outputs": 3}, {"outputs": 10}, r"model\.outputs=3: the data has 10. Type model\.outputs=auto"),
        ({}, {"kind": "uint8"}, "the inputs are uint8, and the model takes fractions"),
    ],
)
def test_a_model_that_does_not_fit_its_data_is_refused(
    part: dict[str, object], facts: dict[str, object], why: str
) -> None:
    cnn = {
        "_target_": "dtrain.model.cnn.CNN",
        "_about_": {"takes": "image"},
        "inputs": "auto",
        "outputs": "auto",
        "width": 4,
        "stages": 1,
        "blocks": 1,
    }
    with pytest.raises(WordsError, match=why):
        construct(cnn | part, facts={"inputs": [1, 8, 8], "outputs": 10, "kind": "float32"} | facts, seed=0)


def test_more_tokens_than_embeddings_are_refused() -> None:
    with pytest.raises(WordsError, match="has 29 rows, the data has tokens up to 255"):
        construct({"_target_": "invariance.zoo.llama"}, facts={"vocab": 256}, seed=0)


def test_batch_norm_and_dropout_are_told() -> None:
    told = caveats(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.1)))
    assert len(told) == 2 and "BatchNorm1d" in told[0] and "dropout" in told[1]


def test_what_does_not_depend_on_the_mesh_is_not() -> None:
    assert caveats(nn.Sequential(nn.LayerNorm(3), nn.Dropout(0.0), nn.Linear(3, 3))) == []


def test_generators_of_the_models_own_are_told_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].noise, model[0].dice = torch.Generator(), np.random.default_rng(0)
    told = caveats(model)
    assert len(told) == 2 and told[0].startswith("0.noise is a generator") and told[1].startswith("0.dice is")


def test_an_evaluation_leaves_each_module_in_its_own_mode() -> None:
    """A frozen part that its model keeps in evaluation mode would train its statistics afterwards."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    with evaluating(model):
        assert not model.training
        model[1].running_mean += 1  # as a codebook does that also learns in evaluation
    assert not model[1].running_mean.any()
    assert [module.training for module in model.modules()] == [True, True, False]


class Merged(nn.Linear):
    """In evaluation its weight holds a product besides."""

    is_merged = False

    def train(self, mode: bool = True) -> "Merged":
        self.is_merged = not mode
        return super().train(mode)


def test_a_model_is_asked_by_its_own_train_and_eval() -> None:
    model = Merged(2, 2)
    with evaluating(model):
        assert model.is_merged
        with evaluating(model):
            assert model.is_merged
        assert model.is_merged
    assert model.training and not model.is_merged


def test_caveats_of_hooks_and_of_norms_that_are_not_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 2))
    assert caveats(model) == []
    model[1].weight.register_hook(lambda grad: grad.clamp(-1, 1))
    (sentence,) = caveats(model)
    assert sentence.startswith("the hook of 1.weight sees the gradient of one microbatch of one rank")


def test_a_caveat_names_the_class_that_the_user_wrote() -> None:
    norm = nn.BatchNorm1d(2)
    norm.__class__ = type("FSDPBatchNorm1d", (FSDPModule, nn.BatchNorm1d), {})  # as fully_shard does
    (sentence,) = caveats(nn.Sequential(norm))
    assert sentence.startswith("BatchNorm1d sees")
