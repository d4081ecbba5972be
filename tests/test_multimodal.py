"""Families whose text model has a head only beside a model of images: read, merged, streamed,
calibrated and diagnosed as the whole that they are stored as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import moemerge
import multimodal_zoo
import zoo
from calibration import cases
from features import reference
from moemerge.architectures.architecture import Architecture
from moemerge.architectures.families import family_of
from moemerge.architectures.roles import Role, Unit
from moemerge.checkpoint.reader import Checkpoint
from moemerge.features.loading import build_skeleton, map_names
from moemerge.features.router_stream import RouterStream
from moemerge.features.routers import anatomy
from moemerge.features.settings import StreamSettings

Folder = Callable[..., Path]
FAMILIES = multimodal_zoo.FAMILIES


def text_units(folder: Path) -> dict[str, tuple[Unit, torch.Tensor]]:
    """The units of the layers, of the embedding and of the head, and what they hold."""
    tensors = zoo.tensors(folder)
    architecture = Architecture.of(zoo.read_config(folder), tensors)
    found: dict[str, tuple[Unit, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        count = torch.zeros(tensor.shape, dtype=torch.int32)
        for unit in architecture.units(name):
            rows = slice(*unit.slot.rows) if unit.slot.rows else slice(None)
            value, seen = (unit.slot.take(t[rows] if t.dim() else t) for t in (tensor, count))
            seen += 1
            assert tuple(value.shape) == unit.shape
            if unit.layer is not None or unit.role in (Role.EMBEDDING, Role.HEAD):
                assert unit.key not in found
                found[unit.key] = (unit, value)
        assert (count == 1).all(), name
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_layouts_pair_up_by_key(zoo_folder: Folder, model_type: str) -> None:
    disk, fused = (text_units(zoo_folder(model_type, fused=fused)) for fused in (False, True))
    assert disk.keys() == fused.keys()
    for key, (unit, value) in disk.items():
        other, again = fused[key]
        assert torch.equal(value, again), key
        same = (unit.role, unit.layer, unit.expert, unit.projection, unit.shape)
        assert same == (other.role, other.layer, other.expert, other.projection, other.shape), key
    roles = [unit.role for unit, _ in disk.values()]
    assert roles.count(Role.ROUTER) == 2
    assert roles.count(Role.EMBEDDING) == roles.count(Role.HEAD) == 1
    assert roles.count(Role.EXPERT) == 2 * 3 * zoo.EXPERTS
    assert roles.count(Role.SHARED_EXPERT) == (0 if model_type == "muse_spark_text" else 6)
    assert roles.count(Role.MLP) == (7 if model_type == "muse_spark_text" else 3)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_original_names_are_their_own_keys(zoo_folder: Folder, model_type: str) -> None:
    for key, (unit, _) in text_units(zoo_folder(model_type)).items():
        if unit.role is not Role.EXPERT:
            assert key == unit.tensor


@pytest.mark.parametrize("model_type", FAMILIES)
def test_numbers_of_the_config(zoo_folder: Folder, model_type: str) -> None:
    folder = zoo_folder(model_type)
    config = zoo.read_config(folder)
    architecture = Architecture.of(config, zoo.tensors(folder))
    assert architecture.family is family_of(model_type) is family_of(config["model_type"])
    assert (architecture.num_layers, architecture.num_experts) == (3, zoo.EXPERTS)
    assert architecture.notice is None
    assert architecture.layer_key.section == ("text_config",)
    assert [place.served for place in architecture.routers()] == [True, True]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_modules_and_tables_agree(zoo_folder: Folder, model_type: str) -> None:
    checkpoint = Checkpoint.open(zoo_folder(model_type))
    table = Architecture.of(checkpoint.config, checkpoint.tensors)
    model = build_skeleton(checkpoint, torch.float32)
    names = map_names(model, checkpoint)
    found = [(r.layer, names.on_disk(r.weight)) for r in anatomy(model).routers]
    assert found == [(place.layer, place.weight) for place in table.routers()]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_merges_and_loads(zoo_folder: Folder, model_type: str, tmp_path: Path) -> None:
    base = zoo_folder(model_type)
    models = [zoo.perturb(base, tmp_path / str(seed), seed) for seed in (1, 2)]
    weighted = [{"model": str(model), "parameters": {"weight": 0.5}} for model in models]
    config = {"merge_method": "task_arithmetic", "base_model": str(base), "models": weighted}
    moemerge.merge(config, tmp_path / "out")
    merged, inputs = zoo.tensors(tmp_path / "out"), [zoo.tensors(m) for m in models]
    assert merged.keys() == inputs[0].keys()
    for name, value in merged.items():
        if value.is_floating_point():
            mean = (inputs[0][name] + inputs[1][name]) / 2
            torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)
    zoo.assert_loads(tmp_path / "out")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_features_are_those_of_the_whole_model(
    zoo_folder: Folder, model_type: str, fused: bool
) -> None:
    folder = zoo_folder(model_type, fused=fused)
    batches = reference.batches()
    found: reference.Features = {}
    with RouterStream(Checkpoint.open(folder), batches, StreamSettings()) as stream:
        for stop in stream:
            pairs = [
                pair
                for domain in stop.domains
                for holdout in (False, True)
                for pair in stop.by_batch(domain, holdout=holdout)
            ]
            pairs.sort(key=lambda pair: batches.index(pair[0]))
            found[stop.path] = [x.clone() for _, x in pairs]
    expected, _ = reference.run_whole(reference.whole_model(folder), tuple(found), batches)
    assert len(found) == 2
    assert list(found) == list(expected)
    for path, tensors in expected.items():
        for got, want in zip(found[path], tensors, strict=True):
            assert torch.equal(got, want), path


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_calibrates(zoo_folder: Folder, model_type: str, tmp_path: Path) -> None:
    case = cases.make_case(zoo_folder(model_type), tmp_path / "case")
    report = case.calibrate(tmp_path / "out", measure=False)
    served = [row["router"] for row in report.layers]
    assert len(served) == 2
    for row in report.layers:
        assert row["status"] == "converged", row
        assert sum(row["kl_after"].values()) < sum(row["kl_before"].values()), row
    assert cases.changed_tensors(case.merged, tmp_path / "out") == set(served)
    zoo.assert_loads(tmp_path / "out")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_routes_exactly_as_itself(
    zoo_folder: Folder, model_type: str, tmp_path: Path
) -> None:
    case = cases.make_case(zoo_folder(model_type), tmp_path, sources=1, rows=4)
    found = moemerge.diagnose(
        case.merged, sources={"math": case.merged}, data=case.data, device="cpu"
    )
    assert [(row.mismatch, row.kl, row.drift) for row in found.layers] == [(0, 0, 0)] * 2
    assert found.total("math").loss == found.total("math").loss_source
