import pytest
import torch

from moemerge.families.rules import Gate, Score
from moemerge.repairs.refit_router import LEAST_SHARE, fit_router
from moemerge.routing import DomainFeatures, RouterProblem

EXPERTS, WIDTH = 8, 24
GATE = Gate(Score.SOFTMAX, top_k=2)
STORED = (torch.float64, None)


def drawn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tokens(count, router, seed, noise=1.0):
    """Whose source routes by `router` on features of its own, which the merged model's are not."""
    x = drawn(count, WIDTH, seed=seed)
    targets = x @ router.T + noise * drawn(count, EXPERTS, seed=seed + 1)
    return [DomainFeatures("math", [x], router, [targets])]


@pytest.fixture
def merged():
    return drawn(EXPERTS, WIDTH, seed=0)


@pytest.fixture
def source(merged):
    return merged + 0.3 * drawn(EXPERTS, WIDTH, seed=1)


def fit(merged, own, held):
    return fit_router(RouterProblem(GATE, merged, own, held, STORED), exact=True)


def test_much_text_is_followed_all_the_way(merged, source):
    own, held = tokens(4000, source, seed=2), tokens(400, source, seed=4)
    found = fit(merged, own, held)
    assert (found.share, found.kept) == (1.0, False)
    assert found.weight.equal(fit(merged, own, []).weight)
    assert found.held_after["math"] < found.held_before["math"]


def test_little_text_is_followed_as_far_as_held_out_tokens_gain(merged, source):
    own, held = tokens(120, source, seed=2), tokens(400, source, seed=4)
    found, whole = fit(merged, own, held), fit(merged, own, [])
    assert whole.share == 1.0
    assert LEAST_SHARE <= found.share < 1.0
    torch.testing.assert_close(
        found.weight, merged + found.share * (whole.weight - merged), rtol=1e-12, atol=1e-12
    )
    problem = RouterProblem(GATE, merged, own, held, STORED)
    errors = {
        share: problem.divergences(held, torch.lerp(merged, whole.weight, share))["math"]
        for share in (0.0, found.share / 2, found.share, found.share * 2, 1.0)
    }
    assert min(errors, key=errors.__getitem__) == found.share
    assert found.held_after["math"] == pytest.approx(errors[found.share], rel=1e-9)
    assert found.held_before["math"] == pytest.approx(errors[0.0], rel=1e-9)


def test_what_held_out_tokens_lose_by_is_not_followed_at_all(merged, source):
    """Not even a little of the way, though a little might help: one row is easily pleased."""
    found = fit(merged, tokens(60, source, seed=2), tokens(400, merged, seed=4, noise=0.0))
    assert (found.share, found.kept) == (0.0, True)
    assert found.weight.equal(merged)
    assert (found.after, found.held_after) == (found.before, found.held_before)


GATES = {
    "softmax": GATE,
    "sigmoid": Gate(Score.SIGMOID, top_k=2),
    "Bernoulli": Gate(Score.SIGMOID, top_k=2, normalised=False),
    "capped": Gate(Score.SOFTMAX, top_k=2, soft_cap=5.0),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", ["a mean", "an outlier", "dead channels", "one token"])
@pytest.mark.parametrize("gate", GATES)
def test_held_out_tokens_never_lose(gate, kind, seed):
    merged = drawn(EXPERTS, WIDTH, seed=seed)
    source = merged + 0.3 * drawn(EXPERTS, WIDTH, seed=seed + 10)

    def unkind(count, seed):
        x = drawn(count, WIDTH, seed=seed)
        if kind == "a mean":
            x += 20.0
        elif kind == "an outlier":
            x[:, 3] *= 300.0
        elif kind == "dead channels":
            x[:, 5:12] = 0.0
        targets = x @ source.T + drawn(count, EXPERTS, seed=seed + 1)
        return [DomainFeatures("math", [x], source, [targets])]

    own = unkind(1 if kind == "one token" else 100, seed + 20)
    problem = RouterProblem(GATES[gate], merged, own, unkind(30, seed + 40), STORED)
    found = fit_router(problem, exact=True)
    assert found.weight.isfinite().all()
    assert found.kept == (found.share == 0.0)
    if found.kept:
        assert found.weight.equal(merged)
    else:
        assert found.held_after["math"] < found.held_before["math"]
