"""Stages run by a schedule: gradients of plain accumulation, whatever the schedule; and called without one, the outputs of the whole model."""

from contextlib import suppress
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import ranks, resident
from small import PARTS, STRATEGIES, UNEVEN, agree, few_steps, joined, mesh_of, on_resident_mesh, small_gpt, tokens
from torch import Tensor, nn

from dtrain.build import build
from dtrain.config import files
from dtrain.config.facts import about
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.objective import Loss
from dtrain.objective.next_token import NextToken
from dtrain.parallel.pipeline import Pipeline
from dtrain.planned import PipelineShape
from dtrain.precision import Precision

GPT = {"_target_": "dtrain.model.gpt.GPT", "vocab": "auto", "layers": 4, "heads": 2, "width": 16, "hidden": 24}
PIPED = PARTS | {"model": GPT, "strategy": STRATEGIES["ddp"]}


def shape_of(word: str, **changed: Any) -> PipelineShape:
    facts = about(files.node("pipeline", word))
    return PipelineShape(**{"schedule": word, "stages": facts["stages"], "layout": facts["layout"]} | changed)


@cache
def reference(uneven: bool) -> Any:
    parts = PARTS | {"model": GPT} | ({"data": UNEVEN} if uneven else {})
    return resident(1, partial(few_steps, parts, {}, microbatch=8, steps=2))[0]


def same_gradients(gradients: dict[str, Any], expected: dict[str, Any]) -> None:
    assert gradients.keys() == expected.keys()
    for name, values in expected.items():
        here, there = torch.tensor(gradients[name]), torch.tensor(values)
        torch.testing.assert_close(
            here, there, rtol=0, atol=1e-5 * there.abs().max().item(), msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("word", files.groups()["pipeline"])
def test_every_schedule_is_plain_accumulation(word: str) -> None:
    """Microbatches with 0 to 9 targets that do not count: a mean of means is wrong."""
    parts = PIPED | {"data": UNEVEN}
    run = joined(resident(2, partial(few_steps, parts, {"pp": 2}, microbatch=2, steps=2, pipeline=shape_of(word))))
    same_gradients(run["gradients"], reference(True)["gradients"])
    agree(run, reference(True))


@pytest.mark.parametrize(
    "changed",
    [
        {"split": (1, 3)},
        {"split": "cost"},
        {"schedule": "looped_bfs", "stages": 1},
        {"schedule": "gpipe", "split": (3, 1)},
    ],
)
def test_wherever_it_is_cut(changed: dict[str, Any]) -> None:
    run = joined(
        resident(2, partial(few_steps, PIPED, {"pp": 2}, microbatch=2, steps=2, pipeline=PipelineShape(**changed)))
    )
    same_gradients(run["gradients"], reference(False)["gradients"])
    agree(run, reference(False))


def test_beside_shards() -> None:
    parts = PIPED | {"data": UNEVEN, "strategy": STRATEGIES["fsdp"]}
    runs = resident(
        4, partial(few_steps, parts, {"pp": 2, "dp_shard": 2}, microbatch=2, steps=2, pipeline=shape_of("1f1b"))
    )
    agree(joined([runs[0], runs[2]]), reference(True))


@pytest.mark.often("loss")
@pytest.mark.parametrize("split", ["nothing", "sequence", "loss"])
def test_beside_split_matrices(split: str) -> None:
    options = {name: "split" if name == split else "whole" for name in ("sequence", "loss")}
    parts = PIPED | {"data": UNEVEN}
    runs = resident(
        4,
        partial(
            few_steps, parts, {"pp": 2, "tp": 2}, microbatch=2, steps=2, pipeline=shape_of("1f1b"), tensors=options
        ),
    )
    agree(joined([runs[0], runs[2]]), reference(True))


# without a schedule


def piped(mesh: Mesh, model: nn.Module, word: str = "1f1b", precision: Precision = Precision()) -> Pipeline:  # noqa: B008 - it is frozen
    return Pipeline(model, mesh, shape_of(word), precision)


def called(mesh: Mesh, word: str) -> tuple[Tensor, int]:
    model = small_gpt(layers=4)
    with torch.no_grad():
        logits = piped(mesh, model, word)(tokens(3, 6))
    return logits, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("word", ["1f1b", "interleaved_1f1b", "zbv"])
def test_called_it_is_the_whole_model_on_every_rank(word: str) -> None:
    whole = small_gpt(layers=4)
    sizes = []
    for logits, here in on_resident_mesh(partial(called, word=word), pp=2):
        torch.testing.assert_close(logits, whole(tokens(3, 6)).detach(), rtol=0, atol=0)
        sizes.append(here)
    assert sum(sizes) == sum(parameter.numel() for parameter in whole.parameters())
    assert max(sizes) < 0.7 * sum(sizes)


class Named(nn.Module):
    """Takes its inputs by name, gives its logits in a mapping, and has one more input that every block is given."""

    pipeline = ("embed", "layers", "head")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList([Scaled(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 13)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.5)

    def forward(self, input_ids: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, scale)
        return {"logits": self.head(x)}


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor | None) -> Tensor:
        y = torch.tanh(super().forward(x))
        return y if scale is None else y * scale[..., None]


class Mapped(NextToken):
    """Inputs of a model in the manner of Hugging Face."""

    def inputs(self, batch: Any) -> Any:
        return {"input_ids": batch["inputs"]}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        loss = super().loss(outputs, batch)
        return Loss(loss.sum, {"right": (answer_of(outputs) == batch["targets"]).sum()})


def answer_of(outputs: Any) -> Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return logits.argmax(-1)


def test_inputs_by_name_and_logits_in_a_mapping() -> None:
    parts = PIPED | {
        "model": {"_target_": f"{__name__}.Named"},
        "objective": {"_target_": f"{__name__}.Mapped"},
        "data": UNEVEN,
    }
    (expected,) = resident(1, partial(few_steps, parts | {"strategy": PARTS["strategy"]}, {}, microbatch=8, steps=2))
    run = joined(resident(2, partial(few_steps, parts, {"pp": 2}, microbatch=2, steps=2, pipeline=shape_of("1f1b"))))
    agree(run, expected)


def stepped(mesh: Mesh, word: str) -> tuple[dict[str, Tensor], list[int], Tensor]:
    """One step of three microbatches in which every stage is given `scale`; gradients, where the loss was called, and the outputs after it."""
    model, seen = Named(), []
    pipeline = piped(mesh, model, word)
    ids, scale = tokens(6, 5).chunk(3), torch.linspace(0.5, 2, 30).view(6, 5).chunk(3)

    def loss(logits: Tensor, index: int) -> Tensor:
        seen.append(index)
        return F.cross_entropy(logits.flatten(0, 1), ids[index].flatten(), reduction="sum") * (index + 1)

    pipeline.step([{"input_ids": a, "scale": b} for a, b in zip(ids, scale, strict=True)], loss)
    with torch.no_grad():
        after = pipeline(input_ids=ids[0], scale=scale[0])
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, seen, after


def test_every_stage_is_given_the_other_inputs_of_its_microbatch() -> None:
    model = Named()
    ids, scale = tokens(6, 5).chunk(3), torch.linspace(0.5, 2, 30).view(6, 5).chunk(3)
    for index in range(3):
        (
            F.cross_entropy(
                model(ids[index], scale[index])["logits"].flatten(0, 1), ids[index].flatten(), reduction="sum"
            )
            * (index + 1)
        ).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    (first, nowhere, _), (second, seen, after) = on_resident_mesh(partial(stepped, word="1f1b"), pp=2)
    assert (nowhere, sorted(seen)) == ([], [0, 1, 2]), "the loss is where the last stage is, once for each microbatch"
    assert torch.allclose(after, model(ids[0], scale[0])["logits"], atol=1e-6), "it can be called after a step"
    gradients = first | second
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def types(mesh: Mesh) -> tuple[str, str]:
    precision = build({"_target_": "dtrain.precision.bf16.build"})
    pipeline = piped(mesh, small_gpt(layers=2), precision=precision)
    seen: list[torch.dtype] = []
    pipeline.step(
        [tokens(2, 6), tokens(2, 6, seed=1)], lambda logits, index: (seen.append(logits.dtype), logits.float().sum())[1]
    )
    gradient = next(p.grad for p in pipeline.parameters() if p.grad is not None)
    return str(gradient.dtype), str(seen[:1])


def test_stages_compute_in_the_precision_of_the_run() -> None:
    first, last = on_resident_mesh(types, pp=2)
    assert first == ("torch.float32", "[]")
    assert last == ("torch.float32", "[torch.bfloat16]")


class Loud(nn.Module):
    """Does something to what flows outside of the modules of its table."""

    pipeline = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Turned(nn.Module):
    """Blocks that look along the other dimension: their outputs do not lie in memory as they are read."""

    pipeline = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turning(4, 4) for _ in range(2))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Turning(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2).tanh()


def gradients_of_turned(mesh: Mesh) -> dict[str, Tensor]:
    model = Turned()
    parts = [torch.ones(1, 4, 3), torch.full((1, 4, 3), 2.0)]
    if mesh.shape.pp == 1:
        model(torch.cat(parts)).square().sum().backward()
    else:
        piped(mesh, model).step(parts, lambda out, _: out.square().sum())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_what_flows_may_lie_in_memory_in_another_order() -> None:
    (expected,) = on_resident_mesh(gradients_of_turned, pp=1)
    first, second = on_resident_mesh(gradients_of_turned, pp=2)
    torch.testing.assert_close(first | second, expected)


class Crossed(nn.Module):
    """The first module of its table is given something else than what flows."""

    pipeline = ("places", "blocks")

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.places = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Embedding(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(torch.arange(3))
        for block in self.blocks:
            x = block(x)
        return x


def refusal(mesh: Mesh, model: type[nn.Module], x: Tensor) -> str:
    with pytest.raises(WordsError) as caught, torch.no_grad():
        Pipeline(model(), mesh, PipelineShape(), Precision())(x)
    return str(caught.value)


def test_a_model_that_changes_what_flows_is_refused() -> None:
    for message in on_resident_mesh(partial(refusal, model=Loud, x=torch.ones(2, 4)), pp=2):
        assert "Loud changes hidden states outside of the modules of its table" in message


def test_a_cut_that_does_not_fit_is_told_as_one() -> None:
    message = ranks(2, lambda: _rank_1(Crossed, torch.ones(2, 3, 4)))[1]
    assert "stage 1 of Crossed fails on the output of stage 0" in message


def _rank_1(model: type[nn.Module], x: Tensor) -> str:
    with mesh_of(pp=2) as mesh:
        if mesh.rank == 1:
            return refusal(mesh, model, x)
        with torch.no_grad(), suppress(RuntimeError, WordsError):  # it waits for the rank that refuses
            Pipeline(model(), mesh, PipelineShape(), Precision())(x)
        return ""


class Normed(nn.Sequential):
    """Names a module that the second stage does not have."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)) for _ in range(2)))

    def train(self, mode: bool = True) -> "Normed":
        super().train(mode)
        self[0][1].eval()  # type: ignore[index]
        return self


def modes(mesh: Mesh) -> list[dict[str, bool]]:
    pipeline = piped(mesh, Normed())
    seen = []
    for mode in (True, False, True):
        pipeline.train(mode)
        named = {
            name: each.training for stage in pipeline.stages.values() for name, each in stage.model.named_modules()
        }
        seen.append({name: mode for name, mode in named.items() if name.count(".") == 1})
    return seen


def test_a_stage_has_the_modes_that_the_whole_model_sets() -> None:
    first, second = on_resident_mesh(modes, pp=2)
    off = {f"0.{number}": False for number in range(3)}
    assert first == [{"0.0": True, "0.1": False, "0.2": True}, off, {"0.0": True, "0.1": False, "0.2": True}]
    assert second[0] == {f"1.{number}": True for number in range(3)} and not any(second[1].values())
