"""Sums and their closed form: against dense algebra, and by hand."""

import math

import pytest
import torch

from moemerge.errors import NumericalError
from moemerge.repairs.least_squares import (
    RIDGES,
    Factor,
    FitSums,
    RidgeRule,
    add_gram,
    choose_ridge,
    fit_map,
)
from moemerge.repairs.refit_experts import SAMPLED, sample_size
from moemerge.repairs.refit_states import ResidualWrite, find_writes

CPU = torch.device("cpu")


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sums_of(x, missing, scale):
    sums = FitSums.empty(missing.shape[1], x.shape[1], CPU)
    sums.add(x, missing, scale)
    return sums


def test_by_hand():
    """One input x = 2 and one output that lacks 3: Δ = 6 / (4 + 4 λ), so 0.75 at λ = 1."""
    sums = sums_of(torch.tensor([[2.0]]), torch.tensor([[3.0]]), torch.ones(1))
    assert float(Factor(sums.gram, 1.0).update(sums.cross)) == pytest.approx(0.75)
    # ‖3 − 0.75 · 2‖² = 2.25
    assert sums.error(torch.tensor([[0.75]])) == pytest.approx(2.25)
    assert sums.tokens == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 3000])
def test_sums_are_the_dense_ones(dtype, tokens):
    x, r = draw(tokens, 5, dtype=dtype), draw(tokens, 3, seed=1, dtype=torch.float32)
    s = torch.rand(tokens, generator=torch.Generator().manual_seed(2))
    sums = FitSums.empty(3, 5, CPU)
    for part in (slice(0, tokens // 2), slice(tokens // 2, tokens)):
        sums.add(x[part], r[part], s[part])
    wide, lacking = s[:, None].double() * x.double(), s[:, None].double() * r.double()
    near = {"rtol": 1e-5, "atol": 1e-6 * tokens**0.5}
    torch.testing.assert_close(sums.gram, wide.T @ wide, **near)
    torch.testing.assert_close(sums.cross, lacking.T @ wide, **near)
    assert float(sums.energy) == pytest.approx(float(lacking.square().sum()), rel=1e-5)
    step = draw(3, 5, seed=3)
    direct = float((lacking - wide @ step.T).square().sum())
    assert sums.error(step) == pytest.approx(direct, rel=1e-5)


@pytest.mark.parametrize("weights", ["one", "each"])
@pytest.mark.parametrize("of_inputs", ["number", "each"])
def test_sums_of_bf16_terms_are_the_same(weights, of_inputs):
    """What many tokens on a GPU are counted by, where the inputs have a factor."""
    x, r = draw(3000, 5, dtype=torch.bfloat16), draw(3000, 3, seed=1, dtype=torch.float32)
    rng = torch.Generator().manual_seed(2)
    s = (
        torch.rand(3000, 1, generator=rng).double()
        if weights == "each"
        else torch.full((1, 1), 0.3)
    )
    factor = 0.7 if of_inputs == "number" else torch.rand(3000, 1, generator=rng)
    wide, terms = FitSums.empty(3, 5, CPU), FitSums.empty(3, 5, CPU)
    wide.add(x, r, s, factor=factor)
    scaled = s.double() * factor * x.double(), s.double() * r.double()
    torch.testing.assert_close(wide.gram, scaled[0].T @ scaled[0])
    torch.testing.assert_close(wide.cross, scaled[1].T @ scaled[0])
    terms._add_terms(x, r, s.double(), factor, gram=True)
    for name in ("gram", "cross", "energy"):
        mine, theirs = getattr(terms, name), getattr(wide, name)
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5, name


def test_maps_that_share_inputs_share_their_gram():
    x, r, other = draw(40, 6), draw(40, 2, seed=1), draw(40, 3, seed=2)
    first = sums_of(x, r, torch.ones(1))
    second = first.sharing_gram(3)
    second.add(x, other, torch.ones(1), gram=False)
    alone = sums_of(x, other, torch.ones(1))
    assert second.tokens == alone.tokens
    torch.testing.assert_close(second.gram, alone.gram)
    torch.testing.assert_close(second.cross, alone.cross)


@pytest.mark.parametrize("ridge", [1e-6, 0.003, 1.0])
@pytest.mark.parametrize("tokens", [3, 50])
def test_the_update_minimises_its_objective(ridge, tokens):
    """Against least squares with the ridge as further rows; also with fewer tokens than inputs."""
    x, r = draw(tokens, 8), draw(tokens, 4, seed=1)
    sums = sums_of(x, r, torch.ones(1))
    damping = (ridge * sums.gram.diagonal().mean()).sqrt()
    rows = torch.cat([x, damping * torch.eye(8).double()])
    wanted = torch.linalg.lstsq(rows, torch.cat([r, torch.zeros(8, 4).double()])).solution.T
    torch.testing.assert_close(Factor(sums.gram, ridge).update(sums.cross), wanted)


def test_inputs_of_zeros_move_nothing():
    sums = sums_of(torch.zeros(5, 4), torch.ones(5, 2), torch.ones(1))
    weight, fit = fit_map(
        torch.ones(2, 4), sums, FitSums.empty(2, 4, CPU), Factor(sums.gram, 0.1), torch.float32
    )
    assert torch.equal(weight, torch.ones(2, 4))
    assert fit.before == fit.after == 10.0


def test_a_matrix_that_cannot_be_factored_says_so():
    broken = torch.diag(torch.tensor([1.0, -2.0, 3.0])).double()
    with pytest.raises(NumericalError, match=r"cannot be factored at any ridge from 0\.01"):
        Factor(broken, 0.01)
    with pytest.raises(NumericalError, match="cannot be factored"):
        Factor(torch.full((2, 2), float("nan")).double(), 0.01)


def test_the_ridge_is_raised_above_rounding_errors_of_the_sums():
    """A negative eigenvalue of 5e-5 of the mean diagonal, as bf16 sums leave it."""
    gram = torch.diag(torch.tensor([2.0, 1.0, -5e-5]).double())

    factor = Factor(gram, 1e-5)

    assert factor.ridge == pytest.approx(10**-3.5)
    assert float(factor.update(torch.tensor([[0.0, 0.0, 1e-7]]).double()).abs().max()) < 1e-3
    assert Factor(gram, 1e-3).ridge == 1e-3


def test_what_does_not_fit_the_stored_dtype_is_refused():
    sums = sums_of(torch.full((1, 1), 1e-3), torch.full((1, 1), 1e6), torch.ones(1))
    with pytest.raises(NumericalError, match=r"does not fit into torch\.float16"):
        fit_map(
            torch.zeros(1, 1),
            sums,
            FitSums.empty(1, 1, CPU),
            Factor(sums.gram, 1e-6),
            torch.float16,
        )


# --- held-out tokens ----------------------------------------------------------------------------


def problem(tokens, noise, seed=0):
    """Calibration and held-out sums of one true map with noise."""
    true = draw(4, 20, seed=seed)
    found = []
    for at, count in enumerate((tokens, 400)):
        x = draw(count, 20, seed=seed + 10 * at + 1)
        r = x @ true.T + noise * draw(count, 4, seed=seed + 10 * at + 2)
        found.append(sums_of(x, r, torch.full((1,), count**-0.5)))
    return found[0], found[1]


@pytest.mark.parametrize(("tokens", "noise"), [(15, 3.0), (30, 3.0), (400, 0.1)])
def test_the_chosen_ridge_is_the_best_of_all(tokens, noise):
    problems = [problem(tokens, noise, seed) for seed in (0, 100)]
    errors = {
        ridge: sum(h.error(Factor(s.gram, ridge).update(s.cross)) for s, h in problems)
        for ridge in RIDGES
    }
    assert choose_ridge(problems) == min(errors, key=errors.__getitem__)


def test_noise_wants_more_ridge():
    assert choose_ridge([problem(30, 3.0)]) > choose_ridge([problem(400, 0.1)])


def test_a_search_begins_where_the_last_one_of_its_kind_ended():
    one, other = [problem(30, 3.0)], [problem(400, 0.1)]
    rule = RidgeRule()
    assert rule.choose("q", one) == choose_ridge(one) == rule.last["q"]
    rule.choose("k", other)
    assert rule.last == {"q": choose_ridge(one), "k": choose_ridge(other)}
    tried = []
    assert rule.choose("q", one, lambda e: tried.append(e) or e) == choose_ridge(one)
    assert len(tried) <= 3  # there and on both sides
    assert RidgeRule(0.25).choose("q", []) == 0.25


def test_a_map_that_loses_on_held_out_tokens_stays_as_merged():
    calibration, _ = problem(15, 1.0)
    _, opposite = problem(15, 1.0)
    opposite.cross.neg_()
    merged = draw(4, 20, seed=9, dtype=torch.float32)
    weight, fit = fit_map(
        merged, calibration, opposite, Factor(calibration.gram, 0.01), torch.float32
    )
    assert fit.kept
    assert torch.equal(weight, merged)
    assert fit.held_after == fit.held_before
    assert fit.after == fit.before
    moved, free = fit_map(
        merged, calibration, opposite, Factor(calibration.gram, 0.01), torch.float32, keep=False
    )
    assert not torch.equal(moved, merged)
    assert free.after < free.before


def test_errors_are_those_of_the_rounded_weight():
    calibration, held = problem(400, 0.1)
    merged = draw(4, 20, seed=9, dtype=torch.bfloat16)
    weight, fit = fit_map(merged, calibration, held, Factor(calibration.gram, 1e-4), torch.bfloat16)
    assert weight.dtype == torch.bfloat16
    step = weight.double() - merged.double()
    assert fit.after == calibration.error(step)
    assert fit.held_after == held.error(step)
    assert fit.held_before == float(held.energy)


def test_eight_experts_choose_the_ridge_or_fewer_large_ones():
    assert sample_size((2048, 1024)) == SAMPLED
    assert sample_size((2048, 2048)) == 4
    assert sample_size((32_768, 16_384)) == 2


# --- what writes to the hidden state ------------------------------------------------------------


def layer(dtype=torch.float32):
    names = ("h", "q", "o", "e", "s")
    return {name: draw(60, 16, seed=at, dtype=dtype) for at, name in enumerate(names)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_are_found_with_their_factors(dtype):
    t = layer(dtype)
    outputs = {name: t[name] for name in ("q", "o", "e", "s")}
    gates = {"g": draw(60, 1, seed=8, dtype=dtype)}
    gated = torch.sigmoid(gates["g"].float()) * t["s"].float()
    left = (t["h"].float() + t["o"].float() + 0.22 * t["e"].float() + gated).to(dtype)
    writes = find_writes(t["h"], left, outputs, gates)
    assert [(write.path, write.gate) for write in writes] == [("o", None), ("e", None), ("s", "g")]
    assert writes[0] == ResidualWrite("o", 1.0)
    assert writes[1].factor == pytest.approx(0.22, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_norm_in_between_is_no_write():
    t = layer()
    normed = t["o"] / t["o"].square().mean(dim=1, keepdim=True).sqrt()
    assert find_writes(t["h"], t["h"] + normed, {"o": t["o"]}, {}) is None
    assert find_writes(t["h"], t["h"], {"o": t["o"]}, {}) is None  # nothing is written at all
    assert find_writes(t["h"], t["h"] + t["o"], {"o": t["o"][:, :8]}, {}) is None
    assert find_writes(t["h"], t["h"] + t["o"], {"o": t["o"] * math.inf}, {}) is None


def test_large_channels_do_not_hide_a_write():
    """One channel a thousand times the others, in bfloat16: its rounding alone is a large error."""
    t = layer(torch.bfloat16)
    t["h"][:, 3] *= 3000
    left = (t["h"].float() + t["o"].float() + t["e"].float()).to(torch.bfloat16)
    writes = find_writes(t["h"], left, {"o": t["o"], "e": t["e"], "q": t["q"]}, {})
    assert writes == (ResidualWrite("o", 1.0), ResidualWrite("e", 1.0))
    # A contribution that is left out is noticed all the same.
    assert find_writes(t["h"], left, {"o": t["o"], "q": t["q"]}, {}) is None


# --- bfloat16 -----------------------------------------------------------------------------------

SMALL = (1e-5, 1e-3)


def assert_sums_of_bfloat16_values(device, tokens, ridge, *, width, within=1e-6):
    """Inputs with a mean, a steep spectrum and two huge channels; the map's move is what counts."""
    outputs, block = width // 2, 65_536
    rng = torch.Generator(device).manual_seed(0)
    scales = torch.logspace(0, -2, width, device=device)
    x = torch.randn(tokens, width, generator=rng, device=device) * scales + 0.5 * scales
    x = x @ torch.linalg.qr(torch.randn(width, width, generator=rng, device=device))[0]
    x[:, :2] += 30.0
    x = x.bfloat16()
    true = torch.randn(outputs, width, generator=rng, device=device)
    r = x.float() @ true.T + 3.0 * torch.randn(tokens, outputs, generator=rng, device=device)
    s = torch.rand(tokens, 1, generator=rng, device=device)
    sums = FitSums.empty(outputs, width, device)
    for at in range(0, tokens, block):
        sums.add(x[at : at + block], r[at : at + block], s[at : at + block])
    wide, lacking = s.double() * x.double(), s.double() * r.double()
    gram, cross = wide.T @ wide, lacking.T @ wide
    mine, dense = Factor(sums.gram, ridge).update(sums.cross), Factor(gram, ridge).update(cross)
    assert float((mine - dense).norm() / dense.norm()) < within
    # Sums in float32 are not good enough here: the test can tell.
    narrow = (s * x.float()).T @ (s * x.float()), (s * r).T @ (s * x.float())
    rough = Factor(narrow[0].double(), ridge).update(narrow[1].double())
    assert float((rough - dense).norm() / dense.norm()) > 1e-5


@pytest.mark.parametrize("ridge", SMALL)
@pytest.mark.parametrize("tokens", [300, 5_000])
def test_sums_of_bfloat16_values(tokens, ridge):
    assert_sums_of_bfloat16_values(torch.device("cpu"), tokens, ridge, width=128)


@pytest.mark.parametrize("width", [3, 512, 513, 1100])
def test_a_gram_by_groups_of_columns(width):
    x = torch.randn(40, width, dtype=torch.float64)
    start = torch.randn(width, width, dtype=torch.float64)
    start = start + start.T
    gram = start.clone()
    add_gram(gram, x)
    assert torch.allclose(gram, start + x.T @ x, atol=1e-12)
