"""Models of the user's own: their shapes from one run without memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from metering import count
from pool import ranks
from small import plan
from torch import Tensor, nn

from dtrain import tracing
from dtrain.errors import WordsError
from dtrain.predict.memory import memory
from dtrain.predict.prediction import predict
from dtrain.predict.report import rows
from dtrain.tracing import shapes_of, tracer

WORDS = ("data=synthetic", "objective=regression", "data.inputs=[24]", "data.outputs=3", "trust=[tracing]", "batch=8")


class Tower(nn.Module):
    """Blocks in a list, a weight outside of them on either side, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.tower = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 80), nn.GELU(), nn.Linear(80, 40)) for _ in range(5)
        )
        self.last = nn.Linear(40, 3)
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.tower:
            x = x + block(x)
        return self.last(x)


class Peeking(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=single",),
        ("strategy=fsdp", "devices=2"),
        ("strategy=ddp", "devices=2", "precision=bf16", "accumulate=2"),
    ],
)
def test_a_model_of_ones_own_is_predicted_as_it_is(words: tuple[str, ...]) -> None:
    decided = plan(*WORDS, "model._target_=tracing.test_tracer.Tower", *words)
    shapes = shapes_of(decided)
    assert not shapes.unknown and shapes.parameters == sum(parameter.numel() for parameter in Tower().parameters())
    found, predicted = ranks(decided.world, count, decided), memory(decided, shapes)
    assert (predicted.parameters, predicted.gradients, predicted.optimizer) == tuple(
        max(rank[name] for rank in found) for name in ("rest", "end", "state")
    )
    assert predicted.activations == pytest.approx(max(rank["kept"] for rank in found), rel=0.1)
    assert shapes.buffers == shapes.saved == 28


def test_a_trace_is_the_same_again() -> None:
    """Under autocast copies of weights come and go, and others get their addresses."""
    decided = plan(*WORDS, "model._target_=tracing.test_tracer.Tower", "precision=bf16")
    first, *others = (tracer.trace(decided)[0].blocks for _ in range(5))
    assert all(other == first for other in others)


def test_equal_blocks_stand_together_and_the_rest_around_them() -> None:
    shapes = shapes_of(plan(*WORDS, "model._target_=tracing.test_tracer.Tower"))
    assert [[weight.name for weight in block.weights][:1] for block in (shapes.blocks[0], shapes.blocks[-1])] == [
        ["first.weight"],
        ["last.weight"],
    ]
    assert [block.count for block in shapes.blocks] == [1, 5, 1]


def test_a_model_that_looks_into_its_numbers_is_known_by_its_weights_alone() -> None:
    decided = plan(*WORDS, "model._target_=tracing.test_tracer.Peeking")
    shapes = shapes_of(decided)
    assert shapes.unknown and shapes.parameters == sum(parameter.numel() for parameter in Tower().parameters())
    found = memory(decided, shapes)
    assert not found.known and found.activations == 0 and found.parameters == 4 * shapes.parameters
    assert (
        "reads values of tensors" in shapes.unknown
        and "test_tracer.py" in shapes.unknown
        and "in forward" in shapes.unknown
    )


def test_an_objective_that_counts_a_confusion_matrix_hides_no_activations() -> None:
    words = (
        *WORDS[2:4],
        "data=synthetic",
        "data.task=classification",
        "trust=[tracing,right_models]",
        "model._target_=tracing.test_tracer.Tower",
    )
    counted, plain = (
        shapes_of(plan(*words, objective))
        for objective in ("objective._target_=right_models.F1", "objective=classification")
    )
    assert (
        not counted.unknown
        and counted.blocks[:-1] == plain.blocks[:-1]
        and counted.blocks[-1].work == plain.blocks[-1].work
    )


class Rated(Tower):
    """As vision transformers drop more of each deeper block."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]


class Clipped(Tower):
    def __init__(self) -> None:
        super().__init__()
        if self.last.weight.max() > 0.1:
            nn.init.zeros_(self.last.weight)


class Measured(Tower):
    """A layer that takes its shape from a sample, which the constructor gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(3)
        self(torch.zeros(1, 24))


@pytest.mark.parametrize("name", ["Rated", "Clipped", "Measured"])
def test_a_model_whose_constructor_needs_numbers_is_known_too(name: str) -> None:
    words = ("strategy=fsdp", "devices=2")
    assert shapes_of(plan(*WORDS, f"model._target_=tracing.test_tracer.{name}", *words)) == shapes_of(
        plan(*WORDS, "model._target_=tracing.test_tracer.Tower", *words)
    )


def test_a_weight_in_two_places_is_counted_once_though_the_constructor_needs_numbers() -> None:
    shapes = shapes_of(plan(*WORDS, "model._target_=tracing.test_tracer.Tied"))
    assert not shapes.unknown and shapes.parameters == sum(parameter.numel() for parameter in Tied().parameters())


class Tied(Clipped):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(24, 40, bias=False)
        self.again.weight = self.first.weight


class Squeezing(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


def test_a_model_that_squeezes_a_batch_of_one_is_not_refused() -> None:
    words = (
        "data=synthetic",
        "data.inputs=[24]",
        "data.outputs=3",
        "trust=[tracing]",
        "batch=8",
        "objective=classification",
    )
    shapes = shapes_of(plan(*words, "model._target_=tracing.test_tracer.Squeezing"))
    assert "takes no batch of one sample" in shapes.unknown and shapes.parameters == sum(
        parameter.numel() for parameter in Tower().parameters()
    )
    with pytest.raises(WordsError, match="the model returns"):
        shapes_of(plan(*words, "model._target_=tracing.test_tracer.Flat"))


class Flat(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten()


def tower() -> nn.Module:
    return Tower()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("mesh.tp=2",), "Tower has no tensor-parallel plan"),
        (("mesh.pp=2",), "Tower does not say where it may be cut"),
        (("mesh.cp=2",), "the forward of Tower takes no position_ids"),
        (("mesh.ep=2",), "Tower holds no experts"),
    ],
    ids=["tp", "pp", "cp", "ep"],
)
def test_a_mesh_over_which_the_model_cannot_be_split_is_refused(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(WordsError, match=problem):
        shapes_of(plan(*WORDS, "model._target_=tracing.test_tracer.tower", "devices=2", *words))
    assert not shapes_of(plan(*WORDS, "model._target_=tracing.test_tracer.tower", "devices=2")).unknown


class Broken(Tower):
    def __init__(self, api_key: str = "") -> None:
        raise RuntimeError(f"no license for {api_key}")


class Elsewhere:
    def __init__(self) -> None:
        raise FileNotFoundError("/cluster/faces")


def test_a_model_that_cannot_be_built_here_is_told_in_one_line_without_its_secrets() -> None:
    decided = plan(
        *WORDS, "model._target_=tracing.test_tracer.Broken", "model.api_key=hello123", "cluster=h100x8", "devices=2"
    )
    shapes = shapes_of(decided)
    told = [text for _, text in rows(decided, predict(decided, shapes))]
    assert (
        told[0].startswith("not known")
        and "RuntimeError: no license for ***, at " in told[0]
        and "test_tracer.py" in told[0]
    )
    assert predict(decided, shapes).to_dict()["memory"]["known"] is False


def test_weights_are_known_where_the_data_is_not_here() -> None:
    decided = plan(
        "model._target_=tracing.test_tracer.Tower",
        "data=dataset",
        "data.dataset._target_=tracing.test_tracer.Elsewhere",
        "objective=regression",
        WORDS[-2],
    )
    shapes = shapes_of(decided)
    assert shapes.parameters == sum(parameter.numel() for parameter in Tower().parameters())
    assert shapes.unknown.startswith("the data cannot be read here: FileNotFoundError: /cluster/faces")


def test_of_a_model_that_takes_its_vocabulary_from_a_tokenizer_that_is_not_here_the_tokenizer_is_told() -> None:
    shapes, model = tracer.trace(plan("data.tokenizer=not/here.json"))
    assert model is None
    assert "not/here.json: it does not exist" in str(shapes)


def test_a_model_is_traced_once_for_all_that_leaves_its_trace_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_traced", {})
    shapes_of(plan(*WORDS, "model._target_=tracing.test_tracer.Tower"))
    monkeypatch.setattr(tracer, "trace", lambda plan: pytest.fail("traced again"))
    shapes_of(
        plan(
            *WORDS,
            "model._target_=tracing.test_tracer.Tower",
            "microbatch=2",
            "remat=full",
            "devices=2",
            "strategy=ddp",
        )
    )
    with pytest.raises(pytest.fail.Exception):
        shapes_of(plan(*WORDS, "model._target_=tracing.test_tracer.Tower", "precision=bf16"))


def test_torch_is_not_imported_for_a_model_of_this_package() -> None:
    code = "import sys, dtrain.tracing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=False).returncode == 0


def test_what_code_of_your_own_raises_is_one_sentence_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = plan(*WORDS, "model._target_=tracing.test_tracer.Broken")
    with pytest.raises(
        WordsError,
        match=r"\Athe model cannot be built here: RuntimeError: no license for, at .*test_tracer.py:\d+ in __init__. DTRAIN_DEBUG=1 shows .*\Z",
    ):
        shapes_of(decided)
    monkeypatch.setenv("DTRAIN_DEBUG", "1")
    with pytest.raises(RuntimeError):
        shapes_of(decided)


class Misfit(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., :-1])


def test_an_operator_that_fails_is_one_reason_and_no_log_of_torch(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("model._target_=tracing.test_tracer.Misfit", "model.in_features=24", "model.out_features=3")
    shapes = shapes_of(plan(*WORDS, *words))
    assert "the forward fails on tensors without memory: RuntimeError" in shapes.unknown
    assert capfd.readouterr().err == ""


def test_of_a_package_that_is_trusted_all_may_be_traced() -> None:
    decided = plan(
        *WORDS[:-2], "trust=[torch]", "model._target_=torch.nn.utils.skip_init", "model.module_cls=x", "batch=8"
    )
    with pytest.raises(WordsError, match="the model cannot be built here: "):
        shapes_of(decided)


class Noisy(Tower):
    def __init__(self) -> None:
        print("by Python")
        os.write(1, b"by the system")
        super().__init__()


def test_what_a_model_prints_is_not_in_the_answer_of_a_command(capfd: pytest.CaptureFixture[str]) -> None:
    shapes_of(plan(*WORDS, "model._target_=tracing.test_tracer.Noisy"))
    print("the answer")
    said = capfd.readouterr()
    assert said.out == "the answer\n"
    assert "by Python" in said.err and "by the system" in said.err


class Leaving(Tower):
    def __init__(self, early: bool = True) -> None:
        super().__init__()
        if early:
            sys.exit("bye")

    def forward(self, x: Tensor) -> Tensor:
        sys.exit("bye")


def test_a_model_that_ends_the_process_is_an_error_with_its_place() -> None:
    words = *WORDS, "model._target_=tracing.test_tracer.Leaving"
    with pytest.raises(WordsError, match=r"cannot be built here: SystemExit: bye, at .*test_tracer.py:\d+ in __init__"):
        shapes_of(plan(*words))
    assert "the forward fails" in shapes_of(plan(*words, "model.early=false")).unknown


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 32), nn.Linear(32, 13)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.body(self.embedding(x), mask=mask))


def test_a_transformer_of_torch_that_looks_into_its_mask_is_traced() -> None:
    decided = plan(
        *("data=synthetic", "data.task=next_token", "data.vocab=13", "data.sequence=32", "objective=next_token"),
        *("model._target_=tracing.test_tracer.Masked", "trust=[tracing]", "batch=16"),
    )
    shapes = shapes_of(decided)
    assert not shapes.unknown
    (found,) = ranks(1, count, decided)
    assert memory(decided, shapes).activations == pytest.approx(found["kept"], rel=0.05)
