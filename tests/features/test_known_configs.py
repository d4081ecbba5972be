"""What transformers makes of a config.json, asked before a model is written."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moemerge
import multimodal_zoo
import zoo
from moemerge.architectures.opened import OpenModel, open_model
from moemerge.errors import ArchitectureError
from moemerge.features.known_configs import ConfigCheck, read_config, require_loadable


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.build("olmoe", tmp_path_factory.mktemp("sound") / "model")


def changed(folder: Path, out: Path, **values: Any) -> Path:
    """The model with other values in its config; `...` leaves one out."""
    shutil.copytree(folder, out)
    config = {**zoo.read_config(folder), **values}
    kept = {name: value for name, value in config.items() if value is not ...}
    (out / "config.json").write_text(json.dumps(kept))
    return out


def check(model: OpenModel, config: dict[str, Any], other: dict[str, Any]) -> None:
    with ConfigCheck(config, model.checkpoint.tensors, {"other": other}, "x/config.json") as made:
        made.result()
        made.result()  # is asked once


@pytest.mark.parametrize("family", [name for name in zoo.FAMILIES if zoo.installed(name)])
def test_what_transformers_saved_passes(family: str, tmp_path: Path) -> None:
    model = open_model("m", zoo.build(family, tmp_path / "model"))
    assert read_config(model.checkpoint.config).filled
    check(model, dict(model.checkpoint.config), dict(model.checkpoint.config))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pad_token_id": -math.inf}, "transformers cannot read it: .*pad_token_id.*-inf"),
        ({"hidden_act": "x"}, "hidden_act is 'x', as transformers reads it, but 'silu' in other"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, .* but 2 in other"),
        ({"rope_parameters": {"rope_type": "x", "rope_theta": 1.0}}, "rope_type 'x' is none"),
        ({"dtype": 16}, "dtype 16 is none that a model can have"),
        ({"vocab_size": ...}, "vocab_size is 50304, .*; model.embed_tokens.weight has 128"),
        ({"num_hidden_layers": ...}, "counts 16 layers, the tensors make 3"),
    ],
)
def test_what_could_not_be_loaded_is_refused(
    sound: Path, values: dict[str, Any], said: str
) -> None:
    model = open_model("m", sound)
    config = dict(model.checkpoint.config)
    wrong = {name: value for name, value in {**config, **values}.items() if value is not ...}
    with pytest.raises(ArchitectureError, match=f"x/config.json: .*{said}"):
        check(model, wrong, config)


@pytest.mark.parametrize("family", multimodal_zoo.FAMILIES)
def test_a_model_of_images_may_rotate_by_a_type_of_its_own(family: str) -> None:
    if not zoo.installed(family):
        pytest.skip(f"the installed transformers has no {family}")
    config = json.loads(multimodal_zoo.config(family).to_json_string(use_diff=False))
    assert read_config(config).filled
    if family == "muse_spark_text":
        for part, rope in (("text_config", "axial"), ("vision_config", "x")):
            wrong = {**config[part], "rope_parameters": {"rope_type": rope, "rope_theta": 1.0}}
            assert "rope_type" in str(read_config({**config, part: wrong}).refused)


def test_models_that_transformers_does_not_know_pass(sound: Path) -> None:
    model = open_model("m", sound)
    config = {**model.checkpoint.config, "model_type": "of-tomorrow", "pad_token_id": "x"}
    assert not read_config(config).filled
    check(model, config, config)


def test_a_merge_of_such_a_config_is_refused_and_nothing_is_written(
    sound: Path, tmp_path: Path
) -> None:
    wrong = changed(sound, tmp_path / "wrong", pad_token_id=-math.inf)
    models = [{"model": str(wrong)}, {"model": str(sound)}]
    config = {"merge_method": "linear", "models": models, "parameters": {"weight": 0.5}}
    with pytest.raises(ArchitectureError, match=r"wrong/config.json: transformers cannot read it"):
        moemerge.merge(config, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]
    moemerge.merge(config, tmp_path / "kept", lenient=True)
    assert zoo.read_config(tmp_path / "kept")["pad_token_id"] == -math.inf
    with pytest.raises(ArchitectureError, match="transformers cannot read it"):
        require_loadable(open_model("m", wrong))
    with pytest.raises(ArchitectureError, match="transformers cannot read it"):
        moemerge.swap_routers(wrong, sound, tmp_path / "out")


def test_a_config_without_its_type_gets_the_one_of_its_class(sound: Path, tmp_path: Path) -> None:
    """Otherwise only who knows the class could load the result."""
    nameless = changed(sound, tmp_path / "nameless", model_type=...)
    config = {"merge_method": "passthrough", "models": [{"model": str(nameless)}]}
    moemerge.merge(config, tmp_path / "out")
    assert zoo.read_config(tmp_path / "out")["model_type"] == "olmoe"


def test_another_process_is_asked_where_transformers_is_not_imported(
    sound: Path, tmp_path: Path
) -> None:
    """It needs no torch, and neither does who asks."""
    wrong = changed(sound, tmp_path / "wrong", pad_token_id=-math.inf)
    asks = (
        "import sys\n"
        "from moemerge.architectures.opened import open_model\n"
        "from moemerge.features.known_configs import require_loadable\n"
        "try:\n    require_loadable(open_model('m', sys.argv[1]))\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
        "print(*({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", asks, str(wrong)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    refused, *_, loaded = done.stdout.split("\n")[:-1]
    assert loaded == ""
    assert refused.startswith(f"ArchitectureError {wrong}/config.json: transformers cannot read it")
