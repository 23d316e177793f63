"""Text from a model, token by token."""

import torch

from dtrain.model.sampling import answers, complete


def successor(tokens: torch.Tensor) -> torch.Tensor:
    """A model sure that 1 comes after 0, 2 after 1, ..., 0 after 4."""
    return 100.0 * torch.nn.functional.one_hot((tokens + 1) % 5, 5).float()


def uncertain(tokens: torch.Tensor) -> torch.Tensor:
    return torch.log(torch.tensor([0.7, 0.2, 0.1])).expand(*tokens.shape, 3)


def sample(
    model: object, *, tokens: int = 6, temperature: float = 1.0, seed: int = 0, context: int = 8, top_p: float = 1.0
) -> list[int]:
    return complete(model, [3, 4], tokens=tokens, context=context, temperature=temperature, seed=seed, top_p=top_p)  # type: ignore[arg-type]


def test_the_prompt_comes_first_and_the_model_goes_on() -> None:
    assert sample(successor) == sample(successor, temperature=0) == [3, 4, 0, 1, 2, 3, 4, 0]


def test_draws_depend_on_the_seed_alone() -> None:
    torch.rand(5)
    first = sample(uncertain, tokens=50)
    torch.rand(5)
    assert sample(uncertain, tokens=50) == first
    assert sample(uncertain, tokens=50, seed=1) != first


def test_temperature_sharpens_and_flattens() -> None:
    counts = {
        temperature: sample(uncertain, tokens=2000, temperature=temperature)[2:].count(0) / 2000
        for temperature in (0.0, 0.5, 1.0, 100.0)
    }
    assert counts[0.0] == 1.0
    assert abs(counts[0.5] - 0.49 / 0.54) < 0.03
    assert abs(counts[1.0] - 0.7) < 0.04
    assert abs(counts[100.0] - 1 / 3) < 0.04


def test_the_nucleus_has_the_likeliest_tokens_that_reach_top_p() -> None:
    def drawn(top_p: float) -> set[int]:
        return {*sample(uncertain, tokens=500, top_p=top_p)[2:]}

    assert drawn(0.5) == drawn(0.69) == {0}
    assert drawn(0.71) == drawn(0.89) == {0, 1}
    assert drawn(0.91) == {0, 1, 2}


def test_the_model_sees_no_more_than_its_context() -> None:
    seen = []

    def watching(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.tolist()[0])
        return successor(tokens)

    sample(watching, tokens=4, context=3)
    assert seen == [[3, 4], [3, 4, 0], [4, 0, 1], [0, 1, 2]]


def test_an_answer_ends_before_a_token_that_ends_it() -> None:
    shown = list[list[int]]()
    assert complete(successor, [3], tokens=9, context=8, temperature=0, seed=0, ends={1}, show=shown.append) == [
        3,
        4,
        0,
    ]
    assert shown == [[3, 4], [3, 4, 0]]
    assert answers(successor, [[0], [2], [4]], tokens=3, context=8, temperature=0, seed=0, ends={4}) == [
        [1, 2, 3],
        [3],
        [0, 1, 2],
    ]


def test_draws_of_a_prompt_do_not_depend_on_the_others() -> None:
    words = {"tokens": 30, "context": 8, "temperature": 1.0, "seed": 4}
    both = answers(uncertain, [[1], [2, 2], [1]], **words)  # type: ignore[arg-type]
    assert both[0] != both[2]
    for number, prompt in enumerate([[1], [2, 2], [1]]):
        assert answers(uncertain, [prompt], first=number, **words) == [both[number]]  # type: ignore[arg-type]
    assert complete(uncertain, [1], **words) == [1, *both[0]]  # type: ignore[arg-type]
