"""A config.json must make exactly the tensors next to it."""

import math
import tempfile

import pytest

import zoo
from moemerge.errors import ArchitectureError, ResourceError
from moemerge.families.opened import open_model
from moemerge.forward.known_configs import (
    UnreadableConfigError,
    check_loadable,
    fill_config,
    require_loadable,
)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_saved_model_and_its_config_with_defaults_are_loadable(family, zoo_folder):
    model = open_model("m", zoo_folder(family))
    require_loadable(model)
    filled = fill_config(model.checkpoint.config)
    if filled is not None:
        check_loadable(filled, model.checkpoint.tensors, "config.json")


def test_what_a_config_class_rejects_is_refused(zoo_folder, monkeypatch):
    model = open_model("m", zoo_folder("olmoe"))
    with pytest.raises(UnreadableConfigError, match="transformers cannot read it"):
        fill_config({**model.checkpoint.config, "pad_token_id": -math.inf})
    assert fill_config({**model.checkpoint.config, "model_type": "of-tomorrow"}) is None
    config = {**model.checkpoint.config, "id2label": {"x": 1}}
    monkeypatch.setattr(model.checkpoint, "config", config)
    with pytest.raises(ArchitectureError, match=r"config.json: transformers cannot read it"):
        require_loadable(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 1}, "has no layer 1, but the checkpoint has model.layers.1"),
        ({"num_hidden_layers": 9}, "the model needs model.layers.* which is missing"),
        ({"intermediate_size": 7}, r"it makes model.layers.0.* but the checkpoint has"),
        ({"num_experts": 3}, r"it makes model.layers.0.* but the checkpoint has"),
        ({"vocab_size": 11}, r"it makes .*embed_tokens.* but the checkpoint has"),
        ({"attention_bias": True}, r"the model needs .*bias \(.*which is missing"),
        ({"hidden_act": "no-such"}, "no model can be built as its config.json says"),
    ],
)
def test_a_config_that_makes_other_tensors_is_refused(change, message, zoo_folder):
    checkpoint = open_model("m", zoo_folder("olmoe")).checkpoint
    with pytest.raises(ArchitectureError, match=message):
        check_loadable({**checkpoint.config, **change}, checkpoint.tensors, "config.json")


def test_a_missing_folder_for_temporary_files_is_not_blamed_on_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ResourceError, match=r"temporary file cannot be written: .*gone"):
        fill_config({"model_type": "olmoe"})
