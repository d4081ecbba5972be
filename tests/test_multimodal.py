"""Families whose text model has a head only beside a model of images: read, merged, streamed,
calibrated and diagnosed as the whole that they are stored as."""

import pytest
import torch

import multimodal_zoo
import zoo
from moemerge.architectures.architecture import Architecture
from moemerge.architectures.families import family_of
from moemerge.architectures.roles import Role

FAMILIES = multimodal_zoo.FAMILIES


def text_units(folder):
    """The units of the layers, of the embedding and of the head, and what they hold."""
    tensors = zoo.tensors(folder)
    architecture = Architecture.of(zoo.read_config(folder), tensors)
    found = {}
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
def test_layouts_pair_up_by_key(zoo_folder, model_type):
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
def test_original_names_are_their_own_keys(zoo_folder, model_type):
    for key, (unit, _) in text_units(zoo_folder(model_type)).items():
        if unit.role is not Role.EXPERT:
            assert key == unit.tensor


@pytest.mark.parametrize("model_type", FAMILIES)
def test_numbers_of_the_config(zoo_folder, model_type):
    folder = zoo_folder(model_type)
    config = zoo.read_config(folder)
    architecture = Architecture.of(config, zoo.tensors(folder))
    assert architecture.family is family_of(model_type) is family_of(config["model_type"])
    assert (architecture.num_layers, architecture.num_experts) == (3, zoo.EXPERTS)
    assert architecture.notice is None
    assert architecture.layer_key.section == ("text_config",)
    assert [place.served for place in architecture.routers()] == [True, True]
