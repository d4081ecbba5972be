from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moemerge.config.dump import config_data, dump_config
from moemerge.config.load import LoadedConfig
from moemerge.config.models import ModelRef
from moemerge.config.yaml_lines import read_yaml

Load = Callable[..., LoadedConfig]

HEAD = "merge_method: ties\nbase_model: org/base@1e5\n"

TEXTS = [
    HEAD + "parameters: {weight: 1e-6}\nmodels: [{model: a}, {model: b+c@d, name: '1e5'}]\n",
    HEAD + "models:\n  - model: a\n    parameters:\n"
    "      weight: [{filter: mlp, value: [0, 1e-3]}, "
    "{filter: 'role:router', value: true}, {value: 1}]\n",
    HEAD + "parameters: {weight: [0.1, 0.2, 0.30000000000000004], normalize: no}\n"
    "slices:\n  - sources: [{model: a, layer_range: [0, 4], parameters: {weight: 1}}]\n"
    "    base_model: a2\n    parameters: {lambda: 2}\n",
    HEAD + "modules: {default: {models: [{model: a}], parameters: {weight: 1}}}\n",
    HEAD + "parameters: {weight: 1}\nmodels: [{model: x/a}, {model: y/b}]\n"
    "dtype: torch.float32\nout_dtype: bfloat16\ntokenizer_source: a\nchat_template: chatml\n"
    "router: {merge_method: linear, parameters: {weight: 0.5}}\n"
    "data: {a: [f, g], b: h}\ncalibration: {gamma: 0.1, layers: last:2, max_tokens: 5}\n",
    HEAD + "parameters: {weight: 1}\nmodels: [{model: x/a}, {model: y/b}]\nrouter: {keep: b}\n"
    "tokenizer:\n  source: base\n  pad_to_multiple_of: 8\n  tokens:\n    'yes': {source: a}\n"
    "    <x>: {source: {kind: model_token, model: b, token: '3'}, force: true}\n"
    "    <y>: {source: {kind: zero}}\n"
    "chat_template: |\n  {% for m in messages %}\n  {{ m.content }}: é\n  {% endfor %}\n"
    "calibration: {data: {a: f}, sources: [a]}\n",
    HEAD + "parameters: {weight: 1}\nmodels: [{model: x/a}]\n"
    "calibration: {data: {z: f}, sources: [{z: q@v}], alpha: 0.5}\n",
    HEAD + "parameters: {weight: 1}\nmodels: [{model: x/a}]\n"
    "calibration: {data: {a: g, z: f}, sources: {z: q@v}}\n",
    HEAD + "parameters: {weight: 1}\nmodels: [{model: {path: x/a, revision: v1+2}}]\n",
    HEAD + "parameters: {weight: 1}\nmodels: [{model: x/a}]\n"
    "data: {a: {file: a.jsonl, prompts: p.jsonl, verify: math, map: {prompt: q}, limit: 9}}\n"
    "calibration: {alpha: 0.5}\n",
    "merge_method: wudi\nbase_model: b\nmodels: [{model: a}]\nparameters: {solver: exact}\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_written_and_read_again_is_the_same(load: Load, text: str) -> None:
    first = load(text)
    written = dump_config(first.config)
    again = load(written)
    assert again.config == first.config
    assert dump_config(again.config) == written
    assert again.merge.models == first.merge.models
    assert again.repair == first.repair


def test_settings_of_a_calibration_are_spelt_out_and_those_of_the_paper(load: Load) -> None:
    text = HEAD + "parameters: {weight: 1}\nmodels: [{model: a}]\ncalibration: {data: {a: f}}\n"
    block = read_yaml(dump_config(load(text).config), "x").data["calibration"]
    assert block["alpha"] == 0.9
    assert block["rtol"] == 1e-6
    assert block["max_steps"] == 1000
    assert (block["layers"], block["curvature"]) == ("all", "full")
    assert block["targets"] == "merged-features"
    assert "gamma" not in block


def test_only_what_was_given_is_written(load: Load) -> None:
    text = HEAD + "parameters: {weight: 1}\nmodels: [{model: a}]\n"
    assert config_data(load(text).config) == {
        "merge_method": "ties",
        "base_model": "org/base@1e5",
        "models": [{"model": "a"}],
        "parameters": {"weight": 1},
    }


def test_a_folder_with_signs_in_its_name_survives_the_folder(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "a@b+c"
    folder.mkdir()
    text = HEAD + f"parameters: {{weight: 1}}\nmodels: [{{model: '{folder}'}}]\n"
    config = load(text).config
    written = dump_config(config)
    folder.rmdir()
    assert config.models is not None
    assert config.models[0].model == ModelRef(str(folder))
    assert load(written).config == config
