"""Wrappers: each against a direct computation, around real merges, and what is refused."""

from itertools import product

import pytest
import torch

import moemerge
import zoo
from collecting import direct
from collecting.cases import token_rows
from merging.gathered import unit_tensors
from moemerge.errors import ConfigError
from moemerge.families.roles import Role
from moemerge.methods.method import METHODS, UnitInfo, UnitStatistics
from moemerge.methods.wrappers import WRAPPERS

SHAPES = [(12, 20), (20, 12), (9, 9), (1, 7), (7, 1)]
NAMES = ("aim", "knots", "svc")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def call(wraps, method, tensors, base, *, statistics=None, role=Role.EXPERT, **options):
    """`method` on tensors with the wrappers around it; options of a wrapper by its name."""
    chosen = METHODS.get(method)
    arguments = chosen.arguments([{"weight": 0.5}] * len(tensors), {}, "unit")
    unit = UnitInfo("unit", role)

    def inner(tensors, base):
        return chosen.merge(tensors, base, arguments, unit)

    for wrap in map(WRAPPERS.get, wraps):
        own = wrap.arguments([], options.get(wrap.schema.name, {}), "unit")
        known = statistics if wrap.schema.statistics else None
        inner = wrap.around(inner, own, unit, known)
    return inner(tensors, base)


def models(shape, n=3, seed=0):
    base = normal(*shape, seed=99)
    return base, [base + 0.3 * normal(*shape, seed=seed + i) for i in range(n)]


@pytest.mark.parametrize("shape", SHAPES)
def test_svc_against_a_singular_value_decomposition(shape):
    base, tensors = models(shape)
    merged = call([], "task_arithmetic", tensors, base)
    u, s, vh = torch.linalg.svd(merged - base, full_matrices=False)
    expected = base.clone()
    for r in range(len(s)):
        shares = []
        for tensor in tensors:
            own = u[:, r] @ (tensor - base)
            shares.append(float((u[:, r] @ (merged - base)) @ own / (own @ own)))
        scale = len(tensors) / sum(max(0.8, share) for share in shares)
        expected += scale * s[r] * torch.outer(u[:, r], vh[r])
    got = call(["svc"], "task_arithmetic", tensors, base, svc={"alpha": 0.8})
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_svc_leaves_models_out_that_did_not_change_the_weight():
    base, tensors = models((8, 10), n=2)
    with_idle = call(["svc"], "task_arithmetic", [*tensors, base.clone()], base)
    torch.testing.assert_close(with_idle, call(["svc"], "task_arithmetic", tensors, base))


@pytest.mark.parametrize("shape", SHAPES)
def test_knots_merges_in_the_shared_basis(shape):
    base, tensors = models(shape)
    u, s, vh = torch.linalg.svd(torch.cat([t - base for t in tensors], dim=1), full_matrices=False)
    parts = (s[:, None] * vh).split(shape[1], dim=1)
    chosen = METHODS.get("ties")
    arguments = chosen.arguments([{"weight": 0.5}] * len(parts), {}, "unit")
    unit = UnitInfo("unit", Role.EXPERT)
    inner = chosen.merge(parts, torch.zeros_like(parts[0]), arguments, unit)
    got = call(["knots"], "ties", tensors, base)
    torch.testing.assert_close(got, base + u @ inner, rtol=1e-8, atol=1e-8)


def test_knots_moves_votes_and_leaves_other_tensors_alone():
    base, tensors = models((6, 11))
    for method in ("ties", "dare_ties", "della"):
        plain = call([], method, tensors, base)
        assert not torch.allclose(call(["knots"], method, tensors, base), plain, atol=1e-3)
    for role in (Role.NORM, Role.EMBEDDING, Role.HEAD):
        wrapped = call(["knots"], "ties", tensors, base, role=role)
        assert torch.equal(wrapped, call([], "ties", tensors, base, role=role))


def test_aim_keeps_less_of_a_change_where_the_base_is_active():
    base, tensors = models((4, 3))
    merged = call([], "task_arithmetic", tensors, base)
    known = UnitStatistics(torch.tensor([2.0, 1.0, 0.0]), 10, 20, 2)
    got = call(["aim"], "task_arithmetic", tensors, base, statistics=known, aim={"omega": 0.2})
    kept = torch.tensor([0.2, 0.6, 1.0], dtype=torch.float64)
    torch.testing.assert_close(got, base + (merged - base) * kept)
    unread = UnitStatistics(torch.zeros(3), 0, 20, 2)
    for statistics in (None, unread):
        assert torch.equal(
            call(["aim"], "task_arithmetic", tensors, base, statistics=statistics), merged
        )


def test_the_first_wrapper_is_nearest_to_the_method():
    base, tensors = models((5, 8))
    known = UnitStatistics(normal(8, seed=5).abs(), 10, 20, 2)
    inside = call(["svc", "aim"], "ties", tensors, base, statistics=known)
    svc = call(["svc"], "ties", tensors, base)
    kept = 1 - 0.6 * known.values / known.values.max()
    torch.testing.assert_close(inside, base + (svc - base) * kept)
    other = call(["aim", "svc"], "ties", tensors, base, statistics=known)
    assert not torch.allclose(inside, other)


def low_rank(base):
    change = torch.outer(normal(base.shape[0], seed=1), normal(base.shape[1], seed=2))
    return base + change.to(base.dtype)


CASES = {
    "equal to the base": lambda base, t: [base.clone(), t[0]],
    "all equal to the base": lambda base, t: [base.clone(), base.clone()],
    "two equal models": lambda base, t: [t[0], t[0].clone()],
    "opposite": lambda base, t: [t[0], 2 * base - t[0]],
    "rank one": lambda base, t: [low_rank(base), t[0]],
}


@pytest.mark.parametrize("shape", [(6, 8), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "tsv", "wudi", "model_stock"])
@pytest.mark.parametrize("name", NAMES)
def test_edge_cases_stay_finite(name, method, shape):
    base, tensors = models(shape)
    base, tensors = base.float(), [t.float() for t in tensors]
    known = UnitStatistics(torch.ones(shape[1]), 10, 20, 2)
    for case, start in product(CASES, (base, torch.zeros(shape))):
        built = CASES[case](start, [t - base + start for t in tensors])
        before = [t.clone() for t in (start, *built)]
        out = call([name], method, built, start, statistics=known)
        assert out.shape == base.shape
        assert out.dtype == base.dtype
        assert out.is_contiguous()
        assert torch.isfinite(out).all(), case
        assert out.abs().max() < 100, case
        if case.startswith("all"):
            torch.testing.assert_close(out, start)
        for tensor, was in zip((start, *built), before, strict=True):
            assert torch.equal(tensor, was)


# --- in a merge -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(zoo_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("wrapped")
    base = zoo.tiny_tokenizer(zoo.perturb(zoo_folder("olmoe"), path / "base", 7, scale=0.0))
    for seed, name in enumerate(("math", "code"), 1):
        zoo.tiny_tokenizer(zoo.perturb(base, path / name, seed, scale=0.3))
    rows = [{"text": f"the {word} is one plus two of three"} for word in ("sum", "list", "code")]
    zoo.write_rows(path / "general.jsonl", rows)
    return path


def config(folder, method="task_arithmetic", **more):
    weights = {"parameters": {"weight": 0.5}} if method in ("task_arithmetic", "ties") else {}
    return {
        "merge_method": method,
        "base_model": str(folder / "base"),
        "models": [{"model": str(folder / n), "name": n, **weights} for n in ("math", "code")],
        **more,
    }


def test_aim_in_a_merge_is_the_direct_computation(folder, tmp_path):
    text = folder / "general.jsonl"
    wrap = {
        "wrapper": "aim",
        "parameters": {"omega": [{"filter": "q_proj", "value": [0, 1]}, {"value": 0.4}]},
    }
    settings = config(
        folder, wrap=[wrap], data={"base": str(text)}, collecting={"dtype": "float32"}
    )
    report = moemerge.merge(settings, tmp_path / "out", device="cpu")
    assert report.to_json()["wrap"] == ["aim"]
    saved = tmp_path / "base.stats"
    moemerge.collect_statistics(
        folder / "base", saved, data=text, kind="activation", device="cpu", dtype="float32"
    )
    again = config(folder, wrap=[wrap], statistics={"base": str(saved)})
    moemerge.merge(again, tmp_path / "again", device="cpu")
    base, math, code = (unit_tensors(folder / n) for n in ("base", "math", "code"))
    sizes = direct.activations(folder / "base", token_rows(folder / "base", text))
    merged, second = unit_tensors(tmp_path / "out"), unit_tensors(tmp_path / "again")
    seen = 0
    for key, value in merged.items():
        assert torch.equal(value, second[key])
        change = 0.5 * (math[key] - base[key]) + 0.5 * (code[key] - base[key])
        if key in sizes and sizes[key][1]:
            s = sizes[key][0] / sizes[key][0].max()
            omega = int(key.split(".")[2]) / 2 if "q_proj" in key else 0.4  # a gradient, 3 layers
            change = change * (1 - (1 - omega) * s)
            seen += 1
        torch.testing.assert_close(value, base[key] + change, rtol=1e-4, atol=1e-5, msg=key)
    assert seen > 50


def test_wrappers_around_a_method_that_has_no_use_for_the_base(folder, tmp_path):
    for name in ("math", "code"):
        moemerge.collect_statistics(
            folder / name, tmp_path / f"{name}.stats", data=folder / "general.jsonl", device="cpu"
        )
    files = {name: str(tmp_path / f"{name}.stats") for name in ("math", "code")}
    moemerge.merge(config(folder, "regmean", statistics=files), tmp_path / "plain", device="cpu")
    wrapped = config(folder, "regmean", statistics=files, wrap="svc")
    report = moemerge.merge(wrapped, tmp_path / "out", device="cpu").to_json()
    assert report["inputs"]["base"]["merged"] == report["inputs"]["base"]["tensors"]
    plain, merged = unit_tensors(tmp_path / "plain"), unit_tensors(tmp_path / "out")
    assert any(not torch.allclose(plain[key], merged[key]) for key in merged)


def test_routers_with_a_method_of_their_own_are_not_wrapped(folder, tmp_path):
    router = {"merge_method": "linear", "parameters": {"weight": 0.5}}
    settings = config(folder, "ties", wrap=["knots", "svc"], router=router)
    moemerge.merge(settings, tmp_path / "out", device="cpu")
    merged = unit_tensors(tmp_path / "out")
    models = [unit_tensors(folder / n) for n in ("math", "code", "base")]
    key = "model.layers.0.mlp.gate.weight"
    mean = sum(m[key] for m in models[:2]) / 2
    torch.testing.assert_close(merged[key], mean, rtol=1e-5, atol=1e-6)
    text = (tmp_path / "out" / "moemerge_config.yml").read_text()
    assert "wrapper: knots" in text
    assert "`knots`, `svc`" in (tmp_path / "out" / "README.md").read_text()


def svc(**parameters):
    return [{"wrapper": "svc", "parameters": parameters}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wrap": ["swc"]}, ["wrap[0]", "did you mean 'svc'"]),
        ({"wrap": ["svc", "svc"]}, ["wrap[1]", "listed twice"]),
        ({"wrap": svc(alpha=0)}, ["alpha must lie in (0, inf)"]),
        ({"wrap": svc(omega=1)}, ["unknown parameter", "alpha"]),
        ({"wrap": [{"wraper": "svc"}]}, ["did you mean 'wrapper'"]),
        ({"wrap": []}, ["must not be empty"]),
        ({"wrap": ["aim"]}, ["'aim' needs mean activations of the base", "base"]),
        ({"wrap": ["aim"], "data": {"math": "m.jsonl"}}, ["no statistics for base"]),
        ({"wrap": ["svc"], "merge_method": "linear"}, ["'linear' takes the base for a model"]),
        ({"wrap": ["svc"], "merge_method": "nuslerp", "base_model": None}, ["need a base_model"]),
        (
            {"wrap": ["knots"], "merge_method": "fisher", "statistics": {"math": "a", "code": "b"}},
            ["knows single weights"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(folder, changes, words):
    with pytest.raises(ConfigError) as caught:
        moemerge.load_config({**config(folder), **changes})
    for word in words:
        assert word in str(caught.value)


def test_what_wraps_several_models_does_not_wrap_one(folder):
    settings = config(folder, "slerp", wrap="knots", parameters={"t": 0.5})
    settings["models"] = settings["models"][:1]
    with pytest.raises(ConfigError, match="aligns several models"):
        moemerge.load_config(settings)
