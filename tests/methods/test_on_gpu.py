"""The same result on a GPU: random masks bit for bit, sums to rounding."""

import pytest
import torch

import moemerge
import zoo
from moemerge.methods._sparsify import draw, keep_largest
from moemerge.methods.della import ascending_order
from moemerge.methods.method import UnitStatistics

pytestmark = pytest.mark.gpu

WEIGHTED = [{"weight": w} for w in (0.4, 0.7)]
THINNED = [{"weight": w, "density": 0.4} for w in (0.4, 0.7)]
RANKED = [{"weight": w, "density": 0.4, "epsilon": 0.2} for w in (0.4, 0.7)]
CASES = {
    "linear": (2, WEIGHTED, {}),
    "task_arithmetic": (2, WEIGHTED, {}),
    "ties": (2, THINNED, {}),
    "dare_linear": (2, THINNED, {}),
    "dare_ties": (2, THINNED, {}),
    "della": (2, RANKED, {}),
    "della_linear": (2, RANKED, {"rescale_norm": "probability"}),
    "breadcrumbs": (2, THINNED, {}),
    "breadcrumbs_ties": (2, THINNED, {}),
    "sce": (2, None, {"select_topk": 0.5}),
    "slerp": (1, None, {"t": 0.3}),
    "nuslerp": (2, WEIGHTED, {"nuslerp_flatten": False}),
    "multislerp": (2, WEIGHTED, {}),
    "model_stock": (2, None, {"filter_wise": True}),
    "karcher": (2, None, {}),
    "nearswap": (1, None, {"t": 0.01}),
    "passthrough": (1, [{"scale": 0.5}], {}),
    "wudi": (2, None, {"solver": "exact"}),
}


@pytest.mark.parametrize("name", CASES)
def test_methods(merge, name):
    count, params, options = CASES[name]
    g = torch.Generator().manual_seed(0)
    base = torch.randn(96, 130, generator=g)
    tensors = [base + 0.1 * torch.randn(96, 130, generator=g) for _ in range(count)]
    member = name in ("linear", "karcher", "passthrough")
    here = merge(name, tensors, base=None if member else base, params=params, **options)
    there = merge(
        name,
        [t.cuda() for t in tensors],
        base=None if member else base.cuda(),
        params=params,
        **options,
    )
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("regmean", {}), ("regmean", {"factor": 1.0, "min_tokens": 600}), ("fisher", {})],
)
def test_methods_with_statistics(merge, name, options):
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(96, 130, generator=g) for _ in range(3)]
    xs = [torch.randn(500, 130, generator=g) for _ in tensors]
    values = [x.T @ x / 500 for x in xs] if name == "regmean" else [t.square() for t in tensors]
    results = []
    for device in ("cpu", "cuda"):
        known = [UnitStatistics(v.to(device), 500, 900, 10) for v in values]
        moved = [t.to(device) for t in tensors]
        results.append(
            merge(name, moved, params=[{"weight": 0.5}] * 3, statistics=known, **options)
        )
    assert results[1].is_cuda
    torch.testing.assert_close(results[1].cpu(), results[0], rtol=1e-4, atol=1e-5)


def test_random_bits():
    for start in (0, 2**32 - 1000):
        gpu = draw(77, start, 100_003, torch.device("cuda"))
        assert torch.equal(gpu.cpu(), draw(77, start, 100_003, torch.device("cpu")))


def test_selection_among_ties():
    values = torch.randn(300_001).bfloat16().float()
    for k in (1, 1000, 180_000, 300_000):
        assert torch.equal(keep_largest(values.cuda(), k).cpu(), keep_largest(values, k))
    rows = values[:300_000].view(300, 1000)
    assert torch.equal(ascending_order(rows.cuda()).cpu(), ascending_order(rows))


@pytest.mark.parametrize("method", ["tsv", "iso_c", "ties"])
def test_queues_of_workers_do_not_change_a_bit(tmp_path, zoo_folder, method):
    base = zoo_folder("olmoe")
    models = [zoo.perturb(base, tmp_path / str(seed), seed) for seed in (1, 2)]
    parameters = {"weight": 0.5, "density": 0.5} if method == "ties" else {}
    settings = {
        "merge_method": method,
        "base_model": str(base),
        "models": [{"model": str(m), "parameters": parameters} for m in models],
    }
    files = []
    for name in ("one", "again"):
        moemerge.merge(settings, tmp_path / name, device="cuda")
        files.append([p.read_bytes() for p in sorted((tmp_path / name).glob("*.safetensors"))])
    assert files[0] == files[1]
