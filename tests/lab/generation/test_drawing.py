"""Draws: the numbers by a plain twin, the distribution by counting, the filters by hand."""

import torch

from moemerge.config.text_settings import GenerationSettings
from moemerge.lab.generation import drawing
from moemerge.lab.generation.drawing import signed, uniform

WORD = 1 << 64


def draw(logits, uniforms, **how):
    return drawing.draw(logits, uniforms, GenerationSettings.model_validate(how))


def twin(stream, step):
    """SplitMix64 in Python's own integers."""
    z = (stream + (step + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return ((z ^ (z >> 31)) >> 11) / 2**53


def test_numbers_equal_those_of_whole_integers():
    streams = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    for step in (0, 1, 1000):
        steps = torch.full((len(streams),), step)
        numbers = uniform(torch.tensor([signed(s) for s in streams]), steps)
        assert numbers.tolist() == [twin(s, step) for s in streams]


def test_numbers_fill_the_unit_interval_evenly():
    numbers = uniform(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64))
    counts = torch.histc(numbers.float(), bins=10, min=0, max=1)
    # Binomial(20000, 1/10): standard deviation 42, so five of them.
    assert (counts - 2000).abs().max() < 212
    steps = uniform(torch.full((20_000,), 7), torch.arange(20_000))
    assert abs(float(steps.mean()) - 0.5) < 0.011


def test_greedy_takes_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    assert draw(logits, torch.tensor([0.99, 0.99]), temperature=0).tolist() == [1, 0]


def test_draws_follow_the_probabilities():
    probabilities = torch.tensor([0.1, 0.2, 0.0, 0.7])
    logits = (2.0 * probabilities.log()).expand(1000, 4)
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = draw(logits, uniforms, temperature=2.0)
    assert torch.bincount(drawn, minlength=4).tolist() == [100, 200, 0, 700]


def test_top_k_and_top_p_leave_the_likeliest():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    rows = logits.expand(1000, 4)

    def counts(**how):
        return torch.bincount(draw(rows, uniforms, temperature=1.0, **how), minlength=4).tolist()

    assert counts(top_k=2) == [571, 429, 0, 0]  # 4/7 and 3/7
    assert counts(top_p=0.6) == [571, 429, 0, 0]  # 0.4 alone holds less than 0.6
    assert counts(top_p=0.4) == [1000, 0, 0, 0]
    assert counts(top_p=0.01) == [1000, 0, 0, 0]
    assert counts(top_k=99, top_p=1.0) == [400, 300, 200, 100]


def test_a_number_next_to_one_draws_a_token_that_can_be_drawn():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    drawn = draw(logits, torch.tensor([1 - 2.0**-53], dtype=torch.float64), temperature=1.0)
    assert drawn.tolist() in ([0], [1])
