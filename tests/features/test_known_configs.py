"""The tables of known config values agree with the installed transformers."""

import math

import pytest
import torch
from transformers.activations import ACT2CLS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import zoo
from moemerge.architectures.config_check import check_config
from moemerge.architectures.config_values import ACTIVATIONS, ATTENTION, EXPERTS, ROPE_TYPES
from moemerge.architectures.opened import open_model
from moemerge.errors import ArchitectureError
from moemerge.features.known_configs import (
    UnreadableConfigError,
    fill_config,
    require_loadable,
)
from moemerge.features.loading import build_skeleton


@pytest.mark.parametrize(
    ("known", "theirs"),
    [
        (ACTIVATIONS, ACT2CLS),
        (ATTENTION, ALL_ATTENTION_FUNCTIONS.valid_keys()),
        (EXPERTS, ALL_EXPERTS_FUNCTIONS.valid_keys()),
        (ROPE_TYPES, ROPE_INIT_FUNCTIONS),
    ],
    ids=["activations", "attention", "experts", "rope"],
)
def test_every_name_of_transformers_is_known(known, theirs):
    assert set(theirs) <= known


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_config_filled_with_defaults_passes(family, zoo_folder):
    model = open_model("m", zoo_folder(family))
    filled = fill_config(model.checkpoint.config)
    assert filled is not None
    check_config(filled, model.checkpoint.tensors, "config.json")


def test_what_a_config_class_rejects_is_refused(zoo_folder, tmp_path, monkeypatch):
    model = open_model("m", zoo_folder("olmoe"))
    require_loadable(model)
    with pytest.raises(UnreadableConfigError, match="transformers cannot read it"):
        fill_config({**model.checkpoint.config, "pad_token_id": -math.inf})
    assert fill_config({**model.checkpoint.config, "model_type": "of-tomorrow"}) is None
    # Some families allow null here; the class of this one does not.
    config = {**model.checkpoint.config, "attention_dropout": None}
    monkeypatch.setattr(model.checkpoint, "config", config)
    with pytest.raises(ArchitectureError, match=r"config.json: transformers cannot read it"):
        require_loadable(model)


def test_no_model_is_built_from_a_config_that_contradicts_its_tensors(zoo_folder, monkeypatch):
    checkpoint = open_model("m", zoo_folder("olmoe")).checkpoint
    monkeypatch.setattr(checkpoint, "config", {**checkpoint.config, "num_experts_per_tok": 99})
    with pytest.raises(ArchitectureError, match="each token goes to 99 experts"):
        build_skeleton(checkpoint, torch.float32)
