"""The stored distributions and the divergence against hand-computed values."""

import math

import pytest
import torch

from moemerge.repairs.distill_teachers import divergence, next_token_loss, top_tokens


def full_divergence(p, q):
    return (p * (p.log() - q.log())).sum(-1)


def test_top_tokens_of_known_probabilities():
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log() + 5.0  # a constant changes nothing

    top = top_tokens(logits, 2)

    assert top.tokens.tolist() == [[1, 2]]
    assert top.log_probs.exp().flatten().tolist() == pytest.approx([0.6, 0.3], rel=1e-5)


def test_divergence_groups_the_remaining_tokens():
    """p = (.5, .3, .1, .1), q = (.25, .25, .25, .25), k = 2: rest .2 against .5."""
    p = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    q = torch.full((1, 4), 0.25)

    found = divergence(q.log(), top_tokens(p.log(), 2))

    expected = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.4)
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_all_tokens_give_the_full_divergence(seed):
    torch.manual_seed(seed)
    p, q = 3.0 * torch.randn(5, 11), 3.0 * torch.randn(5, 11)

    found = divergence(q, top_tokens(p, 11))

    torch.testing.assert_close(found, full_divergence(p.softmax(-1), q.softmax(-1)))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_fewer_tokens_give_a_lower_bound(k):
    torch.manual_seed(k)
    p, q = 2.0 * torch.randn(20, 13), 2.0 * torch.randn(20, 13)

    found = divergence(q, top_tokens(p, k))

    assert bool((found >= -1e-6).all())
    assert bool((found <= full_divergence(p.softmax(-1), q.softmax(-1)) + 1e-5).all())


def test_the_teacher_itself_has_no_divergence_and_no_gradient():
    torch.manual_seed(0)
    logits = torch.randn(4, 9, requires_grad=True)

    loss = divergence(logits, top_tokens(logits.detach(), 3)).sum()
    loss.backward()

    assert float(loss) == pytest.approx(0.0, abs=1e-6)
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-6


def test_a_certain_teacher_gives_finite_gradients():
    logits = torch.zeros(1, 4, requires_grad=True)

    divergence(logits, top_tokens(torch.tensor([[80.0, 0.0, 0.0, 0.0]]), 2)).sum().backward()

    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_next_token_loss_of_known_probabilities():
    logits = torch.tensor([[0.2, 0.8]]).log()

    assert float(next_token_loss(logits, torch.tensor([1]))) == pytest.approx(-math.log(0.8))
