"""dare, della, breadcrumbs and ties: which elements survive, and by hand."""

import pytest
import torch

from moemerge.errors import ConfigError


def task(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(200, 200, generator=g), torch.randn(200, 200, generator=g)


def kept_by(merge, **kw):
    base, theta = torch.zeros(200, 200), torch.ones(200, 200)
    p = {"weight": 1.0, "density": 0.3}
    return merge("dare_linear", [theta], base=base, params=p, rescale=False, **kw) != 0


def test_density_and_untouched_survivors(merge):
    base, theta = task()
    p = {"weight": 1.0, "density": 0.3}
    out = merge("dare_linear", [theta], base=base, params=p, rescale=False)
    kept = out != base
    assert abs(kept.double().mean() - 0.3) < 0.012
    torch.testing.assert_close(out[kept], theta[kept])


def test_rescaling(merge):
    base, theta = task()
    p = {"weight": 1.0, "density": 0.3}
    delta = theta - base
    l1 = merge("dare_linear", [theta], base=base, params=p) - base
    torch.testing.assert_close(l1.abs().sum(), delta.abs().sum(), rtol=1e-4, atol=0)
    paper = merge("dare_linear", [theta], base=base, params=p, rescale_norm="probability") - base
    kept = paper.abs() > 1e-3
    torch.testing.assert_close(paper[kept], delta[kept] / 0.3, rtol=1e-4, atol=1e-5)


def test_masks_differ_by_model_tensor_and_seed_and_by_nothing_else(merge):
    first = kept_by(merge)
    assert torch.equal(first, kept_by(merge))
    for other in (kept_by(merge, key="other"), kept_by(merge, seed=1)):
        overlap = (first & other).double().mean()
        assert abs(overlap - 0.09) < 0.01
    ones, zeros = torch.ones(200, 200), torch.zeros(200, 200)
    p = [{"weight": 1.0, "density": 0.3}, {"weight": 10.0, "density": 0.3}]
    both = merge("dare_linear", [ones, ones], base=zeros, params=p, rescale=False)
    assert torch.equal(both.remainder(10) == 1, first)
    assert abs((both == 11).double().mean() - 0.09) < 0.01


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_ends_of_density(merge, name):
    base, theta = task()
    whole = merge(name, [theta], base=base, params={"weight": 1.0})
    torch.testing.assert_close(whole, theta)
    nothing = merge(name, [theta], base=base, params={"weight": 1.0, "density": 0.0})
    assert torch.equal(nothing, base)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dare_ties", {}, [3.0, 3.0]),  # 3 beats -2; not divided unless asked for
        ("dare_ties", {"normalize": True}, [3.0, 1.0]),
        ("dare_linear", {}, [1.0, 3.0]),
        ("della", {}, [3.0, 1.0]),
        ("della_linear", {}, [1.0, 3.0]),
    ],
)
def test_at_full_density_signs_are_elected_or_models_summed(merge, name, options, expected):
    p = [{"weight": 1.0}, {"weight": 2.0}]
    out = merge(name, [[3.0, 1.0], [-1.0, 1.0]], base=[0.0, 0.0], params=p, **options)
    assert out.tolist() == expected


def test_rescale_factors_do_not_enter_the_divisor(merge):
    """Both agree everywhere: where both survive, the result is their mean, scaled up."""
    ones, zeros = torch.ones(200, 200), torch.zeros(200, 200)
    p = [{"weight": 1.0, "density": 0.5}] * 2
    out = merge(
        "dare_ties", [ones, ones], base=zeros, params=p, normalize=True,
        rescale_norm="probability",
    )  # fmt: skip
    assert out.unique().tolist() == [0.0, 2.0]


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_of_a_small_tensor_nothing_may_be_left_which_is_no_error(merge, name):
    p = {"weight": 1.0, "density": 0.3}
    results = [merge(name, [[2.0]], base=[0.0], params=p, key=f"k{i}").item() for i in range(50)]
    assert set(results) == {0.0, 2.0}  # rescaled to its L1 norm, where it is kept


def keeps(merge, theta, density=0.5, epsilon=0.3, repeats=400, **options):
    """How often each element is kept, over many units."""
    p = {"weight": 1.0, "density": density, "epsilon": epsilon}
    base = torch.zeros_like(theta)
    options = {"rescale": False, **options}
    runs = [
        merge("della_linear", [theta], base=base, params=p, key=f"k{i}", **options)
        for i in range(repeats)
    ]
    return torch.stack(runs)


def test_keep_probability_follows_the_rank_in_the_row(merge):
    row = torch.tensor([5.0, -1.0, 3.0, -4.0, 2.0])
    theta = torch.stack([row, 1000 * row.flip(0), row * 0.001, row.roll(1)])
    frequency = (keeps(merge, theta, repeats=600) != 0).double().mean(0)
    by_rank = torch.tensor([0.2, 0.35, 0.5, 0.65, 0.8], dtype=torch.float64)
    expected = by_rank[(row.abs() - 1).long()]
    for got, want in zip(
        frequency, (expected, expected.flip(0), expected, expected.roll(1)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0.06)


def test_della_rescaling(merge):
    theta = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    p = {"weight": 1.0, "density": 0.5, "epsilon": 0.2}
    l1 = merge("della_linear", [theta], base=torch.zeros(30, 40), params=p)
    torch.testing.assert_close(l1.abs().sum(), theta.abs().sum(), rtol=1e-4, atol=0)
    # divided by each one's own probability, the expectation is the task vector itself
    mean = keeps(merge, theta[:2, :5], repeats=1200, rescale=True, rescale_norm="probability")
    torch.testing.assert_close(mean.mean(0), theta[:2, :5], rtol=0.2, atol=0.1)


def test_rows_of_one_element_are_kept_with_the_density(merge):
    kept = (keeps(merge, torch.ones(2000, 1), repeats=3) != 0).double().mean()
    assert abs(kept - 0.5) < 0.04


def test_a_vector_is_one_row_and_convolutions_have_a_row_per_output(merge):
    theta = torch.tensor([1.0, 2.0, 3.0])
    frequency = (keeps(merge, theta) != 0).double().mean(0)
    torch.testing.assert_close(
        frequency, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64), rtol=0, atol=0.07
    )
    cube = (keeps(merge, theta.view(1, 1, 3)) != 0).double().mean(0).flatten()
    assert torch.equal(cube, frequency)


@pytest.mark.parametrize(("density", "epsilon"), [(0.9, 0.15), (0.1, 0.15)])
def test_impossible_probabilities_are_refused(merge, density, epsilon):
    p = {"weight": 1.0, "density": density, "epsilon": epsilon}
    with pytest.raises(ConfigError, match=r"w: density .* outside \[0, 1\]"):
        merge("della", [[1.0]], base=[0.0], params=p)


THETA = [1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0, 9.0, -10.0]
ZERO = [0.0] * 10


def kept(merge, density, gamma, theta=THETA):
    p = {"weight": 1.0, "density": density, "gamma": gamma}
    out = merge("breadcrumbs", [theta], base=[0.0] * len(theta), params=p)
    return [int(abs(x)) for x in out.tolist() if x]


@pytest.mark.parametrize(
    ("density", "gamma", "expected"),
    [
        (0.5, 0.2, [4, 5, 6, 7, 8]),
        (0.5, 0.0, [6, 7, 8, 9, 10]),
        (0.9, 0.2, [1, 2, 3, 4, 5, 6, 7, 8, 9]),  # density has precedence
        (1.0, 0.2, list(range(1, 11))),
        (0.3, 0.05, [8, 9, 10]),  # int(0.05·10) is none: nothing is dropped on top
        (0.0, 0.2, []),
    ],
)
def test_which_elements_are_kept(merge, density, gamma, expected):
    assert kept(merge, density, gamma) == expected


def test_ties_go_to_the_lower_index_at_both_cuts(merge):
    p = {"weight": 1.0, "density": 0.4, "gamma": 0.2}
    out = merge("breadcrumbs", [torch.ones(10)], base=ZERO, params=p)
    assert out.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]


def test_sum_and_election_by_hand(merge):
    a, b = [4.0, 1.0, 9.0], [-3.0, 2.0, 8.0]
    p = [{"weight": 1.0, "density": 0.34, "gamma": 0.34}, {"weight": 2.0, "density": 0.34,
         "gamma": 0.34}]  # fmt: skip
    # each drops its largest (9, 8) and keeps one: 4 and -3
    out = merge("breadcrumbs", [a, b], base=[0.0] * 3, params=p)
    assert out.tolist() == [-2.0, 0.0, 0.0]
    out = merge("breadcrumbs", [a, b], base=[0.0] * 3, params=p, normalize=True, **{"lambda": 3.0})
    torch.testing.assert_close(out, torch.tensor([-2.0, 0.0, 0.0]))
    out = merge("breadcrumbs_ties", [a, b], base=[0.0] * 3, params=p)
    assert out.tolist() == [-6.0, 0.0, 0.0]
    out = merge("breadcrumbs_ties", [a, b], base=[0.0] * 3, params=p, normalize=True)
    assert out.tolist() == [-3.0, 0.0, 0.0]


def test_breadcrumbs_rescale(merge):
    p = {"weight": 1.0, "density": 0.5, "gamma": 0.2}
    out = merge("breadcrumbs", [THETA], base=ZERO, params=p, rescale=True)
    torch.testing.assert_close(out.abs().sum(), torch.tensor(55.0))


BASE = [0.0, 0.0, 0.0, 0.0]
A = [4.0, -3.0, 1.0, 2.0]  # at density 0.5 trimmed to 4 -3 0 0
B = [-1.0, -5.0, 2.0, 6.0]  # trimmed to 0 -5 0 6


def params(density=1.0, weights=(1.0, 3.0)):
    return [{"weight": w, "density": density} for w in weights]


def test_trimmed_by_hand(merge):
    out = merge("ties", [A, B], base=BASE, params=params(0.5))
    assert out.tolist() == [4.0, (-3.0 - 15.0) / 4, 0.0, 6.0]
    out = merge("ties", [A, B], base=BASE, params=params(0.5), normalize=False, **{"lambda": 0.5})
    assert out.tolist() == [2.0, -9.0, 0.0, 9.0]


def test_who_votes(merge):
    # element 0: 1·4 against 3·(-1): weighted 4 - 3 > 0; with weights 1, 5: 4 - 5 < 0
    out = merge("ties", [A, B], base=BASE, params=params(weights=(1.0, 3.0)))
    assert out[0] == 4.0
    out = merge("ties", [A, B], base=BASE, params=params(weights=(1.0, 5.0)))
    assert out[0] == -1.0
    out = merge("ties", [A, B], base=BASE, params=params(weights=(1.0, 5.0)), election="unweighted")
    assert out[0] == 4.0


def test_a_tied_vote_elects_plus(merge):
    out = merge("ties", [[2.0], [-2.0]], base=[0.0], params=params(weights=(1.0, 1.0)))
    assert out.tolist() == [2.0]


def test_negative_weight_by_hand(merge):
    # contributions 1·4 and -3·(-1) = 3 agree: (4 + 3) / (1 - 3)
    out = merge("ties", [[4.0], [-1.0]], base=[0.0], params=params(weights=(1.0, -3.0)))
    assert out.tolist() == [-3.5]
    # 2·1 and -2·(-1) agree, and their weights cancel: not divided
    out = merge("ties", [[1.0], [-1.0]], base=[0.0], params=params(weights=(2.0, -2.0)))
    assert out.tolist() == [4.0]


def test_zero_weight_does_not_count(merge):
    out = merge("ties", [A, B], base=BASE, params=params(weights=(0.0, 3.0)))
    assert out.tolist() == B
    out = merge("ties", [A, B], base=BASE, params=params(weights=(0.0, 0.0)))
    assert out.tolist() == BASE


def test_rescale_restores_the_l1_norm(merge):
    # |A| sums to 10, kept 7
    out = merge("ties", [A], base=BASE, params=[{"weight": 1.0, "density": 0.5}], rescale=True)
    torch.testing.assert_close(out, torch.tensor([40 / 7, -30 / 7, 0, 0]))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_tiny_tensor_keeps_at_least_one_element(merge, n):
    theta = torch.arange(1.0, n + 1)
    p = [{"weight": 1.0, "density": 0.1}]
    out = merge("ties", [theta], base=torch.zeros(n), params=p)
    assert out.tolist() == [0.0] * (n - 1) + [float(n)]
    p = [{"weight": 1.0, "density": 0.0}]
    assert not merge("ties", [theta], base=torch.zeros(n), params=p).any()


def reference(thetas, base, weights, density):
    """The definition, element by element in float64, by full sorting."""
    deltas = torch.stack([t.double() - base.double() for t in thetas]).flatten(1)
    k = int(density * deltas.shape[1])
    for d in deltas:
        d[d.abs().sort(descending=True, stable=True).indices[k:]] = 0
    w = torch.tensor(weights, dtype=torch.float64)[:, None]
    votes = w * deltas
    s = votes.sum(0).sign()
    s[s == 0] = 1
    m = votes.sign() == s
    divisor = (w * m).sum(0)
    divisor[divisor == 0] = 1
    return base.double() + ((votes * m).sum(0) / divisor).view_as(base)


def test_a_large_tensor_against_the_definition(merge):
    g = torch.Generator().manual_seed(0)
    base = torch.randn(300, 500, generator=g).double().float()
    thetas = [base + 0.1 * torch.randn(300, 500, generator=g) for _ in range(3)]
    weights = [0.4, 0.7, 0.3]
    p = [{"weight": w, "density": 0.3} for w in weights]
    # subtraction in float32 moves a few deltas past each other: give both sides the same ones
    exact = [t.double() for t in thetas]
    out = merge("ties", exact, base=base.double(), params=p)
    torch.testing.assert_close(out, reference(exact, base, weights, 0.3), rtol=1e-12, atol=1e-12)
    narrow = merge("ties", thetas, base=base, params=p)
    assert ((narrow - out).abs() > 1e-5).sum() <= 10
