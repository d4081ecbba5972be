"""Adafactor against torch's own, and its rounding of bfloat16 weights."""

import copy

import pytest
import torch

from moemerge.repairs import adafactor as optimisers
from moemerge.repairs.adafactor import Adafactor, make_optimiser


@pytest.mark.parametrize("shape", [(), (7,), (5, 3)])
def test_one_matrix_is_updated_as_by_torch(shape):
    torch.manual_seed(0)
    ours = torch.randn(shape, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    pair = (
        Adafactor([ours], 1e-2),
        torch.optim.Adafactor([theirs], lr=1e-2, weight_decay=0.0),
    )
    for _ in range(4):
        gradient = torch.randn(shape)
        for value, optimiser in zip((ours, theirs), pair, strict=True):
            value.grad = gradient.clone()
            optimiser.step()

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_matrices_of_a_stack_are_updated_alone(monkeypatch):
    """In chunks of any size."""
    torch.manual_seed(0)
    stack, gradient = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    single = [matrix.clone() for matrix in stack]
    monkeypatch.setattr(optimisers, "CHUNK", 40)
    for values, gradients in (([stack], [gradient]), (single, list(gradient))):
        for value, own in zip(values, gradients, strict=True):
            value.grad = own
        make_optimiser("adafactor", values, 0.1).step()

    torch.testing.assert_close(stack, torch.stack(single))


def test_small_updates_add_up_in_bfloat16():
    """A hundred updates of 1e-4 of a weight, each far below the spacing of bfloat16."""
    torch.manual_seed(0)
    value = torch.ones(100, 100, dtype=torch.bfloat16)
    optimiser = Adafactor([value], 1e-4)
    for _ in range(100):
        value.grad = torch.ones_like(value)
        optimiser.step()

    assert float(value.float().mean()) == pytest.approx(0.99, abs=3e-4)


def test_a_loaded_state_continues_to_the_same_bits():
    torch.manual_seed(0)
    value = torch.randn(6, 8).bfloat16()
    optimiser = Adafactor([value], 1e-2)
    gradients = torch.randn(4, 6, 8).bfloat16()

    def steps(numbers, value, optimiser):
        for number in numbers:
            torch.manual_seed(number)
            value.grad = gradients[number]
            optimiser.step()

    steps(range(2), value, optimiser)
    state = copy.deepcopy(optimiser.state_dict())
    resumed = value.clone()
    steps(range(2, 4), value, optimiser)
    other = Adafactor([resumed], 0.0)
    other.load_state_dict(state)
    steps(range(2, 4), resumed, other)

    assert torch.equal(value, resumed)
