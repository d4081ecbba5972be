"""What every registered method promises, whatever it computes."""

import re
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import pytest
import torch

import moemerge.methods as methods
from moemerge.config.parameters import REQUIRED, BasePolicy
from moemerge.families.roles import Role
from moemerge.methods.method import METHODS, UnitInfo, UnitStatistics

# Every method of the package: a new one is tested here without being named.
NAMES = sorted(
    n for n in METHODS if METHODS.get(n).function.__module__.startswith(methods.__name__)
)
SHAPES = [(), (1,), (7,), (1, 1), (5, 1), (1, 5), (6, 8), (3, 1, 4), (2, 3, 4), (0,), (0, 4)]
ACTIVE = {  # parameters under which a method does something
    "density": 0.5,
    "epsilon": 0.2,
    "gamma": 0.1,
    "scale": 0.5,
    "rescale": True,
    "select_topk": 0.5,
    "filter_wise": True,
    "nuslerp_flatten": False,
    "steps": 5,
}


def chosen(method, *, active, per_model):
    values = {}
    for spec in method.schema.parameters:
        if spec.per_model != per_model:
            continue
        if spec.name in ("weight", "t"):
            values[spec.name] = 0.3
        elif spec.name in ACTIVE and (active or spec.name == "steps"):  # defaults take hundreds
            values[spec.name] = ACTIVE[spec.name]
    return values


def count_of(method, wanted=3):
    return min(wanted, method.schema.max_models or wanted)


def drawn(method, shape, seed, dtype=torch.float32):
    """A base, and as many fine-tunes of it as the method merges, of three."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=g, dtype=dtype)
    count = count_of(method)
    changes = [torch.randn(shape, generator=g, dtype=dtype) for _ in range(count)]
    return base, [base + 0.1 * change for change in changes]


def statistics_of(method, tensor):
    """Statistics that depend on the tensor alone; none where a real file would have none."""
    kind = method.schema.statistics
    if kind is None or (kind == "gram" and tensor.dim() != 2):
        return None
    values = tensor.square() if kind == "fisher" else tensor.T @ tensor / max(1, len(tensor))
    return UnitStatistics(values.float().contiguous(), 100, 200, 10)


def call(method, tensors, base, *, active=True, role=Role.EXPERT, known=True, **options):
    options = {**chosen(method, active=active, per_model=False), **options}
    models = [chosen(method, active=active, per_model=True)] * len(tensors)
    arguments = method.arguments(models, options, "unit")
    base = None if method.schema.base is BasePolicy.MEMBER else method.base_of(arguments, base)
    unit = UnitInfo("unit", role, models=tuple("abc"[: len(tensors)]))
    statistics = [statistics_of(method, t) if known else None for t in tensors]
    return method.merge(tensors, base, arguments, unit, statistics)


def test_methods_are_found():
    assert len(NAMES) >= 31
    assert {"linear", "ties", "wudi", "regmean"} <= set(NAMES)


@pytest.mark.parametrize("active", [False, True], ids=["defaults", "active"])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_dtypes_and_untouched_inputs(name, active):
    method = METHODS.get(name)
    for shape, dtype in product(SHAPES, (torch.float32, torch.float64)):
        base, tensors = drawn(method, shape, 1, dtype)
        before = [t.clone() for t in (base, *tensors)]
        for role in (Role.EXPERT, Role.NORM):
            out = call(method, tensors, base, active=active, role=role)
            assert out.shape == base.shape
            assert out.dtype == dtype, shape
            assert out.is_contiguous(), shape
            assert torch.isfinite(out).all(), shape
        for t, was in zip((base, *tensors), before, strict=True):
            assert torch.equal(t, was)


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_computed_in_float64(name):
    method = METHODS.get(name)
    base, tensors = drawn(method, (4, 6), 2, torch.float64)
    wide = call(method, tensors, base)
    narrow = call(method, [t.float() for t in tensors], base.float())
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-5)
    assert not torch.equal(narrow.double(), wide)


@pytest.mark.parametrize("name", NAMES)
def test_a_transposed_view_counts_as_its_canonical_copy(name):
    method = METHODS.get(name)
    base, tensors = drawn(method, (9, 5), 3)
    seen = call(method, [t.T for t in tensors], base.T)
    copied = call(method, [t.T.contiguous() for t in tensors], base.T.contiguous())
    assert torch.equal(seen.contiguous(), copied)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if METHODS.get(n).schema.base is not BasePolicy.MEMBER]
)
def test_models_equal_to_the_base_give_the_base(name):
    method = METHODS.get(name)
    base = torch.linspace(-1, 1, 24).view(4, 6)
    out = call(method, [base.clone() for _ in range(count_of(method))], base)
    torch.testing.assert_close(out, base)


@pytest.mark.parametrize("dead", [0.0, 1.5], ids=["zero", "constant"])
@pytest.mark.parametrize("name", NAMES)
def test_constant_tensors_stay_finite(name, dead):
    method = METHODS.get(name)
    base = torch.full((3, 4), dead)
    same = call(method, [base.clone() for _ in range(count_of(method))], base)
    assert torch.isfinite(same).all()
    other = call(method, [base + 1 for _ in range(count_of(method))], base)
    assert torch.isfinite(other).all()


@pytest.mark.parametrize("name", NAMES)
def test_opposite_and_zero_task_vectors_stay_finite(name):
    method = METHODS.get(name)
    g = torch.Generator().manual_seed(4)
    base = torch.randn(6, 5, generator=g)
    change = torch.randn(6, 5, generator=g)
    for tensors in ([base + change, base - change, base], [-base, base, 0 * base]):
        out = call(method, tensors[: count_of(method)], base)
        assert torch.isfinite(out).all()
        assert out.abs().max() < 100


def _rank_one(base):
    out, width = base.shape
    return base + torch.outer(torch.linspace(0.1, 0.3, out), torch.linspace(-0.2, 0.2, width))


EDGES = {  # what a merge of experts meets: frozen ones, copies, dead ones, adapters
    "one model equal to the base": lambda base, t: [base.clone(), *t[1:]],
    "two equal models": lambda base, t: [t[0], t[0].clone(), *t[2:]],
    "a rank-1 update": lambda base, t: [_rank_one(base), *t[1:]],
    "rank-1 updates alone": lambda base, t: [_rank_one(base) for _ in t],
    "a model of zeros": lambda base, t: [torch.zeros_like(base), *t[1:]],
    "rounded to bfloat16": lambda base, t: [base.bfloat16().float(), *t[1:]],
}


@pytest.mark.parametrize("name", NAMES)
def test_edge_cases_are_finite_and_of_a_sensible_size(name):
    """No result is larger than twice all that went into it."""
    method = METHODS.get(name)
    shapes = ((6, 8), (1, 8), (8, 1), (1, 1))
    for edge, shape, zero in product(EDGES, shapes, (False, True)):
        g = torch.Generator().manual_seed(9)
        base = torch.zeros(shape) if zero else torch.randn(shape, generator=g)
        others = [base + 0.1 * torch.randn(shape, generator=g) for _ in range(3)]
        tensors = EDGES[edge](base, others)[: count_of(method)]
        out = call(method, tensors, base, active=False)
        assert out.shape == base.shape
        assert torch.isfinite(out).all(), (edge, shape, zero)
        size = float(torch.stack([*tensors, base]).norm())
        own = 3 * 0.07 if name == "doge" else 1e-3  # the size it gives every task vector
        assert float(out.norm()) <= 2 * size + own, (edge, shape, zero)


# Methods by which copies of a model are that model; others scale or cut task vectors by design.
IDENTICAL = (
    *("breadcrumbs", "breadcrumbs_ties", "dare_linear", "dare_ties", "della", "della_linear"),
    *("fisher", "karcher", "linear", "lore", "lot", "model_stock", "multislerp", "nuslerp"),
    *("ram", "ramplus_tl", "regmean", "sce", "slta", "task_arithmetic", "ties", "wudi"),
)


@pytest.mark.parametrize("name", IDENTICAL)
def test_identical_models_with_full_weight_give_that_model(name):
    """With defaults and normalized shares, n copies of one model are that model."""
    method = METHODS.get(name)
    base, (model, *_) = drawn(method, (4, 6), 5)
    options = {}
    if name == "wudi":  # copies of one task vector interfere: their minimum is the vector itself
        options = {"solver": "exact"}
    elif any(spec.name == "normalize" for spec in method.schema.parameters):
        options = {"normalize": True}
    models = [model] * count_of(method)
    out = call(method, models, base, active=False, known=False, **options)
    torch.testing.assert_close(out, model)


IN_ORDER = ("dare", "della", "slerp", "nearswap", "opcm", "pass")
SYMMETRIC = [n for n in NAMES if not n.startswith(IN_ORDER)]


@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_order_of_equally_weighted_models_does_not_matter(name):
    method = METHODS.get(name)
    base, tensors = drawn(method, (4, 6), 6)
    forward = call(method, tensors, base)
    torch.testing.assert_close(call(method, tensors[::-1], base), forward)


BY_UNIT = re.findall(
    r"`([a-z_*]+)`",
    (Path(__file__).parents[2] / "docs" / "footguns.md")
    .read_text(encoding="utf-8")
    .partition("the unit is one projection")[2]
    .partition("differ from")[0],
)


@pytest.mark.parametrize("name", [n for n in NAMES if any(fnmatch(n, one) for one in BY_UNIT)])
def test_methods_that_pages_call_different_by_the_unit_are(name, monkeypatch):
    """Two experts, of which much and little changed, one by one and as a stack."""
    method = METHODS.get(name)
    for by_row in ("filter_wise", "nuslerp_flatten"):  # then a row is the unit
        monkeypatch.delitem(ACTIVE, by_row)
    g = torch.Generator().manual_seed(4)
    much = torch.tensor([0.9, 0.3])[:, None, None]
    base = torch.randn(2, 6, 8, generator=g)
    tensors = []
    for _ in range(count_of(method, 2)):
        change = 3 * much * torch.randn(2, 6, 8, generator=g)
        tensors.append(base + change * (torch.rand(2, 6, 8, generator=g) < much))
    stack = call(method, tensors, base)
    alone = [call(method, [t[at] for t in tensors], base[at]) for at in range(2)]
    assert not torch.allclose(stack, torch.stack(alone), rtol=1e-3)


@pytest.mark.parametrize("name", [n for n in NAMES if METHODS.get(n).elementwise])
def test_elementwise_methods_commute_with_cutting(name):
    method = METHODS.get(name)
    base, tensors = drawn(method, (6, 4), 7)
    whole = call(method, tensors, base)
    parts = [call(method, [t[s] for t in tensors], base[s]) for s in (slice(0, 2), slice(2, 6))]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_do_not_show(name, monkeypatch):
    """The same numbers whether a tensor is walked in one piece or in many."""
    from moemerge.methods import _tensors

    method = METHODS.get(name)
    base, tensors = drawn(method, (16, 24), 8)
    whole = call(method, tensors, base)
    monkeypatch.setattr(_tensors, "CPU_CHUNK", 64)
    torch.testing.assert_close(call(method, tensors, base), whole, rtol=1e-6, atol=1e-7)


NEEDED = {  # the one parameter without a default, as in mergekit
    **dict.fromkeys(("slerp", "nearswap"), "t"),
    **dict.fromkeys(("linear", "task_arithmetic", "ties", "nuslerp", "multislerp"), "weight"),
    **dict.fromkeys(("dare_linear", "dare_ties", "della", "della_linear"), "weight"),
    **dict.fromkeys(("breadcrumbs", "breadcrumbs_ties"), "weight"),
    **dict.fromkeys(("sce", "model_stock", "karcher", "passthrough", "ram"), None),
}


@pytest.mark.parametrize("name", NEEDED)
def test_required_parameters_have_no_default(name):
    parameters = METHODS.get(name).schema.parameters
    needed = NEEDED[name]
    required = [p.name for p in parameters if p.default is REQUIRED]
    assert required == ([] if needed is None else [needed])


DEFAULTS = {  # mergekit's, where it has the method
    "linear": {"normalize": True},
    "task_arithmetic": {"normalize": False, "lambda": 1.0, "rescale": False, "density": 1.0},
    "ties": {"normalize": True, "rescale": False, "lambda": 1.0, "density": 1.0},
    "dare_linear": {"normalize": False, "rescale": True, "lambda": 1.0, "density": 1.0},
    "dare_ties": {"normalize": False, "rescale": True, "lambda": 1.0, "density": 1.0},
    "della": {"normalize": True, "rescale": True, "epsilon": 0.15, "density": 1.0},
    "della_linear": {"normalize": False, "rescale": True, "epsilon": 0.15, "density": 1.0},
    "breadcrumbs": {"normalize": False, "rescale": False, "gamma": 0.01, "density": 1.0},
    "breadcrumbs_ties": {"normalize": False, "rescale": False, "gamma": 0.01, "density": 1.0},
    "sce": {"select_topk": 1.0, "int8_mask": False},
    "nuslerp": {"nuslerp_flatten": True, "nuslerp_row_wise": False},
    "multislerp": {"normalize_weights": True, "eps": 1e-8},
    "model_stock": {"filter_wise": False},
    "karcher": {"max_iter": 10, "tol": 1e-5},
    "passthrough": {"scale": None},
    "wudi": {"solver": "adam", "lr": 1e-5, "steps": 300, "others": "average"},
    "regmean": {"weight": 1.0, "factor": 0.9, "normalize": True, "min_tokens": 16},
    "fisher": {"weight": 1.0, "normalize": True, "floor": 1e-6},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    defaults = {p.name: p.default for p in METHODS.get(name).schema.parameters}
    assert {key: defaults[key] for key in DEFAULTS[name]} == DEFAULTS[name]
