"""The whole calibration against Algorithm 1 written out, and against the model it wrote."""

import pytest
import torch

import zoo
from repairs.calibration import cases, dense

SETTINGS = {
    "alpha": {"alpha": 0.5},
    "gamma": {"gamma": 0.3},
    "diagonal": {"curvature": "diagonal"},
    "weights": {"weights": {"code": 5.0}},
}
INITS = {"alpha": "average", "gamma": "zero"}  # where to start does not change the answer


# Every setting with three sources; one of them with another family and two sources.
@pytest.mark.parametrize(
    ("family", "sources", "name"),
    [
        *(("olmoe", 2, name) for name in SETTINGS if name != "weights"),
        ("olmoe", 3, "weights"),
        ("qwen3_moe", 2, "weights"),
    ],
)
def test_routers_are_those_of_algorithm_1(family, sources, name, case_of, tmp_path):
    settings = SETTINGS[name]
    case = case_of(family, sources=sources)
    init = INITS.get(name, "merged")
    case.calibrate(tmp_path / "out", measure=False, init=init, **settings)
    expected = dense.harc(case.merged, case.sources, case.rows(), **settings)
    before, after = zoo.tensors(case.merged), zoo.tensors(tmp_path / "out")
    assert cases.changed_tensors(case.merged, tmp_path / "out") == set(expected)
    for weight, router in expected.items():
        move = (router - before[weight]).norm()
        assert move > 1e-3 * router.norm(), weight
        assert (after[weight] - router).norm() <= 2e-3 * move, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_report_is_true_of_the_model_that_was_written(dtype, case_of, tmp_path):
    """In bfloat16 this holds only if rounded routers made the next layers' features."""
    case = case_of("olmoe", dtype=dtype)
    report = case.calibrate(tmp_path / "out", dtype="float32")
    model = dense.load(tmp_path / "out")
    merged = zoo.tensors(case.merged)
    written = zoo.tensors(tmp_path / "out")
    assert written["model.layers.0.mlp.gate.weight"].dtype == dtype
    rows = case.rows()
    for row, gate in zip(report.layers, dense.gates(model).values(), strict=True):
        for name, folder in case.sources.items():
            x = dense.router_inputs(model, gate, rows[name])
            source = zoo.tensors(folder)[row["router"]]
            assert row["tokens"][name] == len(x)
            for when, router in (("before", merged), ("after", written)):
                kl = dense.mean_kl(x, source, router[row["router"]])
                assert row[f"kl_{when}"][name] == pytest.approx(kl, rel=1e-3, abs=1e-7)
                missed = dense.mismatch(x, source, router[row["router"]], zoo.TOP_K)
                assert row[f"mismatch_{when}"][name] == pytest.approx(missed, abs=0.01)
