"""What one forward and backward keeps and computes, noted for each part of a model."""

import pytest
import torch
import torch.nn.functional as F
from predict.foreign import MODELS
from small import plan
from torch import nn

from dtrain.predict.shapes import Block
from dtrain.tracing import shapes_of
from dtrain.tracing.notes import Listener, Part, Watch
from dtrain.tracing.tensors import storage, weight_edges


def listed(name: str) -> list[Block]:
    """Of each block as many entries as it stands for."""
    return [
        block
        for block in shapes_of(plan(*MODELS[name].split(), "batch=8")).blocks
        for _ in range(block.count)
        if block.listed
    ]


def test_a_block_that_runs_twice_is_noted_twice() -> None:
    assert [block.uses for block in listed("shared")] == [2, 2, 1]


def test_no_backward_comes_by_what_is_frozen_below_all_that_learns() -> None:
    blocks = listed("frozen")
    assert [block.grad_out for block in blocks] == [False, False, False, True]
    assert [bool(block.backward_work) for block in blocks] == [False, False, False, True]


def test_a_frozen_block_above_what_learns_has_a_backward() -> None:
    assert all(block.grad_out and block.backward_work for block in listed("adapter"))


@pytest.mark.parametrize("grouped", [False, True])
def test_an_attention_is_heard_by_any_name(grouped: bool) -> None:
    """Four heads of 8 over 6 tokens; keys and values of two where they are shared, values of 5."""
    watch, attend = Watch(nn.Identity(), []), F.scaled_dot_product_attention
    q, k, v = (
        torch.zeros(1, 4, 6, 8, requires_grad=True),
        torch.zeros(1, 2 if grouped else 4, 6, 8),
        torch.zeros(1, 2 if grouped else 4, 6, 5),
    )
    with Listener(watch):
        attend(q, key=k, value=v, enable_gqa=grouped)
    (heard,) = watch.part.attention
    assert (heard.heads, heard.kv_heads, heard.head, heard.value, heard.tokens, heard.bytes) == (
        4,
        k.shape[1],
        8,
        5,
        6,
        4,
    )
    assert heard.grad_out and not heard.split


def test_what_a_weight_waits_for_is_noted_and_what_lies_behind_it() -> None:
    """relu(linear(x)): the gradient of the product waits; of what relu saved nothing is needed any more."""
    linear = nn.Linear(3, 5)
    watch, part = Watch(linear, []), Part("block", True)
    x = torch.zeros(2, 3, requires_grad=True)
    with watch, torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack):
        watch.enter(part, linear, x)
        watch.leave(part, linear, x, F.relu(linear(x)))
    assert sum(part.saved["deferred_wgrad"].values()) == sum(part.saved["ends"].values()) == 2 * 5 * 4
    assert sum(part.saved["saved_input"].values()) == 2 * 3 * 4


def test_the_gradient_of_a_weight_is_taken_off_once() -> None:
    """Where it is complete, and not again where it is freed."""
    linear, x = nn.Linear(4, 3), torch.ones(2, 4)
    watch = Watch(linear, [x])
    with watch:
        loss = linear(x).sum()
        watch.begin_backward(loss)
        loss.backward()
        for weight in linear.parameters():
            watch.settle(weight)
        before = watch.alive
        linear.zero_grad()
    assert watch.alive == before


def test_gradients_on_their_way_to_an_embedding_are_activations() -> None:
    """All leaves of the graph are weights: only what a weight itself gets is set apart."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    edges = dict(weight_edges(model(torch.arange(2)).sum().grad_fn, {storage(each) for each in model.parameters()}))
    edges = {node.name(): places for node, places in edges.items()}
    assert set(edges) == {"AddmmBackward0", "TBackward0", "EmbeddingBackward0"}
    assert edges["AddmmBackward0"] == [0, 2]
