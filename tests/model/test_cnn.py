"""A small residual network whose numbers do not depend on how a batch is split."""

import pytest
import torch

from dtrain.model.cnn import CNN


def filled(**changed: object) -> CNN:
    model = CNN(**{"inputs": [3, 16, 16], "outputs": 5, "width": 8, "stages": 3, "blocks": 2} | changed)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize("training", [True, False])
def test_the_outputs_do_not_depend_on_the_split_of_the_batch(training: bool) -> None:
    model, x = filled().train(training), torch.randn(8, 3, 16, 16)
    parts = torch.cat([model(part) for part in x.split(3)])
    assert torch.allclose(parts, model(x), atol=1e-5)


def test_there_is_nothing_but_parameters_to_keep() -> None:
    assert list(filled().buffers()) == []


def test_each_stage_doubles_the_channels_and_halves_the_image() -> None:
    shapes: list[tuple[int, ...]] = []
    model = filled()
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: shapes.append(tuple(output.shape[1:])))
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 5)
    assert shapes == [(8, 16, 16), (8, 16, 16), (16, 8, 8), (16, 8, 8), (32, 4, 4), (32, 4, 4)]


@pytest.mark.parametrize("width", [1, 6, 8])
@pytest.mark.parametrize("size", [8, 9])
def test_any_width_and_image_work(width: int, size: int) -> None:
    assert filled(width=width, inputs=[1, size, size])(torch.randn(2, 1, size, size)).shape == (2, 5)


def test_inputs_that_are_no_image_are_refused_by_key() -> None:
    with pytest.raises(ValueError, match=r"model\.inputs"):
        CNN(inputs=[64], outputs=5, width=8, stages=1, blocks=1)


def test_every_parameter_is_filled_and_a_fresh_block_changes_nothing() -> None:
    model = CNN(inputs=[3, 8, 8], outputs=5, width=8, stages=2, blocks=1)
    for name, parameter in model.named_parameters():
        whole = torch.full(parameter.shape, float("nan"))
        model.init_weight(name, whole, torch.Generator().manual_seed(1))
        assert torch.isfinite(whole).all(), name
        with torch.no_grad():
            parameter.copy_(whole)
    x = torch.randn(2, 8, 8, 8)
    assert torch.allclose(model.blocks[0](x), x)
    assert model(torch.randn(2, 3, 8, 8)).abs().max() < 20


def test_an_image_of_which_nothing_is_left_is_refused() -> None:
    """The norm of a group of one number is zero, and so are all gradients."""
    with pytest.raises(ValueError, match=r"stage 4 of 32 channels|stage 3 of 8 channels"):
        CNN(inputs=[1, 4, 4], outputs=3, width=2, stages=8, blocks=1)
    CNN(inputs=[1, 4, 4], outputs=3, width=32, stages=5, blocks=1)


@pytest.mark.parametrize("height", [1, 7])
def test_an_image_of_one_column_has_no_gradient_from_beside_it_in_bf16(height: int) -> None:
    """torch 2.13 and 2.14 on the CPU give a convolution with a stride of 2 over one column the gradient of memory that nothing was written to."""
    model = filled(inputs=[3, height, 1], width=32).bfloat16()
    for _ in range(10):
        junk = [torch.full((numbers,), float("nan")) for numbers in (1000, 10_000, 100_000, 1_000_000)]
        del junk
        model.zero_grad()
        model(torch.randn(8, 3, height, 1).bfloat16()).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            if parameter.shape[2:] == (3, 3):
                assert not parameter.grad[..., ::2].any(), name
