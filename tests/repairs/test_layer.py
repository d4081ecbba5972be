"""A repair is a function of a layer: the framework does the rest."""

import json
from typing import ClassVar

import pytest
import torch

import zoo
from moemerge.config.repair_settings import CALIBRATION, CalibrationSettings
from moemerge.errors import NumericalError
from moemerge.repairs.inputs import RepairRequest
from moemerge.repairs.layer import REPAIRS, repair
from moemerge.repairs.report import RepairReport
from moemerge.repairs.routers import ChosenRouters
from moemerge.runtime.progress import Silent


class HalvingReport(RepairReport):
    repair = CALIBRATION
    totals: ClassVar = {}
    card_section = "Routers were halved."

    def own_json(self):
        return {}


def prepare(job):
    routers = ChosenRouters.of(job.merged, list(job.sources.values()), job.settings.layers)
    job.layers, job.pairs, job.runs_sources = routers.layers, routers.pairs, False


@pytest.fixture
def halving():
    """Halve every router; record the mean size of the next one's inputs."""
    sizes = []

    @repair("halve", prepare=prepare, report=HalvingReport)
    def halve(layer, settings):
        for router in layer.routers():
            sizes.append(float(router.stop.inputs("math")[0].abs().mean()))
            new = layer.replace({router.name: router.merged.weight / 2})
            assert torch.equal(router.stop.weight, new[router.name].float())
            layer.report({"layer": layer.number, "size": sizes[-1], "earlier": len(layer.earlier)})

    yield halve, sizes
    del REPAIRS["halve"]


def run(case, halve, out, **options):
    request = RepairRequest(
        merged=case.merged,
        out=out,
        sources=case.sources,
        data={name: [path] for name, path in case.data.items()},
        settings=CalibrationSettings(device="cpu"),
        **options,
    )
    return halve.run(request, Silent())


def test_a_repair_replaces_and_reports_layer_by_layer(halving, case, tmp_path):
    halve, sizes = halving
    report = run(case, halve, tmp_path / "out")
    before, after = zoo.tensors(case.merged), zoo.tensors(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{number}.mlp.gate.weight" for number in range(3)}
    for name in changed:
        assert torch.equal(after[name], before[name] / 2)
    assert [row["earlier"] for row in report.layers] == [0, 1, 2]  # rows of the layers below
    written = json.loads((tmp_path / "out" / "moemerge_report.json").read_text())
    assert [row["size"] for row in written["calibration"]["layers"]] == sizes
    # The next layers run with the halved routers.
    again = replace_sizes(case, halve, tmp_path, sizes)
    assert again[0] == sizes[0]
    assert again[1:] != sizes[1:]


def replace_sizes(case, halve, tmp_path, sizes):
    """The sizes of the inputs in a run on the halved model."""
    count = len(sizes)
    halved = type(case)(tmp_path / "out", case.sources, case.data)
    run(halved, halve, tmp_path / "again")
    return sizes[count:]


def test_a_result_that_is_not_finite_is_refused_and_nothing_is_written(case, tmp_path):
    @repair("spoil", prepare=prepare, report=HalvingReport)
    def spoil(layer, settings):
        for router in layer.routers():
            layer.replace({router.name: router.merged.weight * torch.inf})

    try:
        with pytest.raises(NumericalError, match=r"gate\.weight: the new weights are not finite"):
            run(case, spoil, tmp_path / "deep" / "out")
    finally:
        del REPAIRS["spoil"]
    assert not (tmp_path / "deep").exists()
