"""The tables of known config values agree with the installed transformers."""

import json
import math
import tempfile

import pytest
import torch
import transformers
from transformers.activations import ACT2CLS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import zoo
from moemerge.errors import ArchitectureError, ResourceError
from moemerge.families.config_check import check_config
from moemerge.families.config_values import (
    ACTIVATIONS,
    ATTENTION,
    EXPERTS,
    ROPE_TYPES,
    TYPES_FILE,
)
from moemerge.families.opened import open_model
from moemerge.forward.known_configs import (
    UnreadableConfigError,
    fill_config,
    require_loadable,
)
from moemerge.forward.loading import build_skeleton
from tools.config_types import config_types


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


def test_types_are_those_of_the_pinned_transformers():
    """If this fails after an update, run `python -m tools.config_types`."""
    record = json.loads(TYPES_FILE.read_bytes())
    if record["transformers"] == transformers.__version__:
        assert record["types"] == config_types()
    assert record["types"]["olmoe"]["clip_qkv"] == "float|null"


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_what_the_check_accepts_transformers_reads(family, zoo_folder):
    model = open_model("m", zoo_folder(family))
    config = dict(model.checkpoint.config)
    for key in config.keys() - {"model_type", "transformers_version"}:
        for value in (None, True, 0, -1, 3, 1.5, "x", [], {}):
            try:
                check_config({**config, key: value}, model.checkpoint.tensors, "config.json")
            except ArchitectureError:
                continue
            assert fill_config({**config, key: value}) is not None


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
    config = {**model.checkpoint.config, "id2label": {"x": 1}}
    monkeypatch.setattr(model.checkpoint, "config", config)
    with pytest.raises(ArchitectureError, match=r"config.json: transformers cannot read it"):
        require_loadable(model)


def test_no_model_is_built_from_a_config_that_contradicts_its_tensors(zoo_folder, monkeypatch):
    checkpoint = open_model("m", zoo_folder("olmoe")).checkpoint
    monkeypatch.setattr(checkpoint, "config", {**checkpoint.config, "num_experts_per_tok": 99})
    with pytest.raises(ArchitectureError, match="each token goes to 99 experts"):
        build_skeleton(checkpoint, torch.float32)


def test_a_missing_folder_for_temporary_files_is_not_blamed_on_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ResourceError, match=r"temporary file cannot be written: .*gone"):
        fill_config({"model_type": "olmoe"})
