"""A mesh drawn at random is refused before launch, with a reason, or trains and gives the numbers of one process. Nothing between."""

import random

import pytest
from invariance.layouts import MODELS
from invariance.run import reference, run, worst
from small import plan

from dtrain.errors import WordsError

STEPS = 3


def drawn(seed: int) -> tuple[str, str]:
    """(model, words): every axis, every option, sensible or not; at most eight ranks."""
    draw = random.Random(seed)
    model = draw.choice(["gpt", "gpt", "gpt", "moe", "moe", "mlp", "cnn", "tied"])
    words = [f"strategy={draw.choice(['ddp', 'zero1', 'zero2', 'zero3', 'fsdp', 'hsdp', 'pipeline'])}"]
    product = 1
    for axis, chance in (
        ("tp", 0.35),
        ("pp", 0.35),
        ("cp", 0.25),
        ("ep", 0.4 if model == "moe" else 0.03),
        ("dp_replicate", 0.1),
        ("dp_shard", 0.05),
    ):
        if draw.random() < chance:
            degree = draw.choice([1, 2, 2, 2, 2, 2, 3, 4])
            words.append(f"mesh.{axis}={degree}")
            product *= 1 if axis == "ep" else degree
    fits = [ranks for ranks in (2, 4, 8) if ranks % product == 0][:2]
    words.append(f"devices={draw.choice(fits if fits and draw.random() < 0.85 else [2, 3, 4, 6])}")
    pipeline = any(word.startswith(("mesh.pp", "strategy=pipeline")) for word in words)
    options = (
        (
            "pipeline.schedule",
            ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"],
            pipeline,
        ),
        ("pipeline.split", ["cost", "blocks", "[1,3]"], pipeline),
        ("tensor.sequence", ["split", "whole"], any("mesh.tp" in word for word in words)),
        ("tensor.loss", ["split", "whole"], any("mesh.tp" in word for word in words)),
        ("context.attention", ["ring", "ulysses"], any("mesh.cp" in word for word in words)),
        ("remat", ["none", "full", "selective", "budget"], True),
        ("microbatch", ["1", "2", "4", "3"], True),
        ("accumulate", ["2", "4", "8"], True),
    )
    for key, values, fits in options:
        chance = 0.15 if key in ("microbatch", "accumulate", "pipeline.split") else 0.4
        if draw.random() < (chance if fits else 0.02):
            words.append(f"{key}={draw.choice(values)}")
    return model, " ".join(words)


def judged(seed: int) -> bool:
    """Whether it trained. Raises when it was neither refused nor right."""
    model, words = drawn(seed)
    try:
        plan(*MODELS[model].split(), "batch=8", *words.split())
    except WordsError as refused:
        assert all(len(problem) > 20 for problem in refused.problems), "a reason, not a code"
        return False
    found = worst(run(MODELS[model], words, steps=STEPS), reference(MODELS[model], STEPS, "fp32"))
    assert found["losses"] <= 2e-6 and found["gradients"] <= 2e-6, (model, words, found)
    return True


@pytest.mark.often("[0-3]")
@pytest.mark.parametrize("seed", range(8))
def test_a_mesh_is_refused_or_right(seed: int) -> None:
    judged(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_hundred_meshes_are_refused_or_right(seed: int) -> None:
    judged(seed)


def test_of_the_hundred_many_train() -> None:
    trained = 0
    for seed in range(100, 200):
        model, words = drawn(seed)
        try:
            plan(*MODELS[model].split(), "batch=8", *words.split())
            trained += 1
        except WordsError:
            continue
    assert 30 <= trained <= 90, "draws that are all refused, or none, would show nothing"
