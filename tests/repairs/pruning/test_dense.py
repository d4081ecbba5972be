"""Repairs of pruned models against dense float64 computations with nothing of ours in them."""

import pytest
import torch

import moemerge
import zoo
from collecting.direct import whole_model
from repairs.calibration import cases
from repairs.pruning.cases import slice_experts, text_for
from repairs.refitting.dense import Twin, run
from repairs.refitting.test_twin import worst

RIDGE = 0.003
ALPHA = 0.9
EXPERTS = 12
KEPT = [0, 2, 3, 5, 6, 7, 10, 11]  # two thirds, the same number of both groups
COUNT = {"deepseek_v3": "n_routed_experts", "gpt_oss": "num_local_experts"}
# The layer with the first router; DeepSeek begins with a dense one.
FIRST = {
    "olmoe": "model.layers.0.",
    "deepseek_v3": "model.layers.1.",
    "gpt_oss": "model.layers.0.",
}


@pytest.mark.parametrize("family", FIRST)
def test_routers_and_maps_are_the_dense_ones(family, zoo_folder, tmp_path):
    count = {COUNT.get(family, "num_experts"): EXPERTS}
    base = zoo_folder(family, tokenizer=True, **count)
    kept = {layer: KEPT for layer in range(3)}
    pruned = slice_experts(base, tmp_path / "pruned", kept)
    data = text_for(pruned, rows=6)
    rows = cases.token_rows(pruned, data)
    options = {"sources": {"o": base}, "data": {"o": data}, "holdout": 0.0, "device": "cpu"}
    out = tmp_path / "calibrated"
    moemerge.calibrate(
        pruned, out, **options, targets="source-features", dtype="float64", rtol=1e-12
    )
    after = zoo.tensors(out)
    expected = routers(pruned, base, rows, kept)
    changed = cases.changed_tensors(pruned, out)  # the first router has its source's features
    assert changed == {name for name in expected if not name.startswith(FIRST[family])}
    for name, router in expected.items():
        assert (after[name].double() - router).norm() <= 1e-6 * router.norm(), name
    out = tmp_path / "refitted"
    moemerge.refit(pruned, out, **options, ridge=RIDGE, router="keep")
    twin = Twin(pruned, {"o": base}, {"o": rows}, RIDGE, kept).refit()
    error, where = worst(twin, out)
    assert error < 1e-4, where


def routers(pruned, base, rows, kept):
    """HARC towards the source's routing among the kept experts, router by router."""
    model, source = whole_model(pruned), whole_model(base)
    found = {}
    for path in [p for p, _ in model.named_modules() if p.endswith(("mlp.gate", "mlp.router"))]:
        ours, theirs = model.get_submodule(path), source.get_submodule(path)
        x, y = (run(m, rows, [path])[path].argument(0) for m in (model, source))
        chosen = list(kept[int(path.split(".")[2])])
        wanted = theirs.weight[chosen]
        bias = getattr(ours, "bias", None)
        if bias is not None:
            ones = torch.ones(len(x), 1, dtype=x.dtype)
            x, y = torch.cat([x, ones], 1), torch.cat([y, ones], 1)
            wanted = torch.cat([wanted, theirs.bias[chosen, None]], 1)
        solution = harc(x, y @ wanted.T, wanted, sigmoid=hasattr(ours, "e_score_correction_bias"))
        solution = solution.float().double()
        if bias is not None:
            ours.bias.copy_(solution[:, -1])
            found[f"{path}.bias"], solution = solution[:, -1], solution[:, :-1]
        ours.weight.copy_(solution)
        found[f"{path}.weight"] = solution
    return found


def harc(x, z, wanted, *, sigmoid):
    p, g = torch.softmax(z, dim=1), torch.ones_like(z)
    if sigmoid:
        s = torch.sigmoid(z)
        p, g = s / s.sum(dim=1, keepdim=True), 1 - s
    h = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    h = g[:, :, None] * h * g[:, None, :]
    size = wanted.numel()
    sigma = torch.einsum("tij,ta,tb->iajb", h, x, x).reshape(size, size) / len(x)
    pull = torch.einsum("tij,tj,ta->ia", h, z, x).reshape(size) / len(x)
    own = sigma.diagonal()
    regular = ALPHA * sigma + (1 - ALPHA) * torch.diag(own)
    right = ALPHA * pull + (1 - ALPHA) * own * wanted.reshape(size)
    return torch.linalg.solve(regular, right).reshape(wanted.shape)
