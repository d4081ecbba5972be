"""Configs written and read again are the same, also those that mergekit's users write."""

import pytest

import moemerge.methods  # noqa: F401  (fills METHODS)
from moemerge.config.dump import config_data, dump_config
from moemerge.config.load import check_document
from moemerge.config.models import ModelRef
from moemerge.config.yaml_lines import read_document, read_yaml
from moemerge.methods.method import METHODS

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
def test_written_and_read_again_is_the_same(load, text):
    first = load(text)
    written = dump_config(first.config)
    again = load(written)
    assert again.config == first.config
    assert dump_config(again.config) == written
    assert again.merge.models == first.merge.models
    assert again.repairs == first.repairs


def test_settings_of_a_calibration_are_spelt_out_and_those_of_the_paper(load):
    text = HEAD + "parameters: {weight: 1}\nmodels: [{model: a}]\ncalibration: {data: {a: f}}\n"
    block = read_yaml(dump_config(load(text).config), "x").data["calibration"]
    assert block["alpha"] == 0.9
    assert block["rtol"] == 1e-6
    assert block["max_steps"] == 1000
    assert (block["layers"], block["curvature"]) == ("all", "full")
    assert block["targets"] == "merged-features"
    assert "gamma" not in block


def test_only_what_was_given_is_written(load):
    text = HEAD + "parameters: {weight: 1}\nmodels: [{model: a}]\n"
    assert config_data(load(text).config) == {
        "merge_method": "ties",
        "base_model": "org/base@1e5",
        "models": [{"model": "a"}],
        "parameters": {"weight": 1},
    }


@pytest.mark.parametrize(
    ("given", "written"),
    [("tokenizer_source: union", {}),
     ("tokenizer: {pad_to_multiple_of: 8}", {"pad_to_multiple_of": 8})],
)  # fmt: skip
def test_a_union_of_vocabularies_is_written(load, given, written):
    text = HEAD + f"parameters: {{weight: 1}}\nmodels: [{{model: a}}]\n{given}\n"
    config = load(text).config
    assert config_data(config)["tokenizer"] == {"source": "union", **written}
    assert load(dump_config(config)).config == config


def test_a_folder_with_signs_in_its_name_survives_the_folder(load, tmp_path):
    folder = tmp_path / "a@b+c"
    folder.mkdir()
    text = HEAD + f"parameters: {{weight: 1}}\nmodels: [{{model: '{folder}'}}]\n"
    config = load(text).config
    written = dump_config(config)
    folder.rmdir()
    assert config.models is not None
    assert config.models[0].model == ModelRef(str(folder))
    assert load(written).config == config


TIES = """
models:
  - model: psmathur/orca_mini_v3_13b
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: garage-bAInd/Platypus2-13B
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: WizardLM/WizardMath-13B-V1.0
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: TheBloke/Llama-2-13B-fp16
parameters:
  normalize: true
  int8_mask: true
dtype: float16
"""
DARE_TIES = """
models:
  - model: mistralai/Mistral-7B-v0.1
    # no parameters necessary for base model
  - model: samir-fama/SamirGPT-v1
    parameters:
      density: 0.53
      weight: 0.4
  - model: abacusai/Slerp-CM-mist-dpo
    parameters:
      density: [0.2, 0.53, 0.8]
      weight: 0.3
merge_method: dare_ties
base_model: mistralai/Mistral-7B-v0.1
parameters:
  int8_mask: true
dtype: bfloat16
"""
SLERP = """
slices:
  - sources:
      - model: psmathur/orca_mini_v3_13b
        layer_range: [0, 40]
      - model: garage-bAInd/Platypus2-13B
        layer_range: [0, 40]
merge_method: slerp
base_model: psmathur/orca_mini_v3_13b
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # fallback for rest of tensors
dtype: float16
"""
FRANKENMERGE = """
slices:
  - sources:
    - model: psmathur/orca_mini_v3_13b
      layer_range: [0, 24]
  - sources:
    - model: garage-bAInd/Platypus2-13B
      layer_range: [20, 40]
      parameters:
        scale:
          - filter: o_proj
            value: 0.0
          - filter: down_proj
            value: 0.0
          - value: 1.0
merge_method: passthrough
dtype: float16
"""
DELLA = """
merge_method: della
base_model: ./base
models:
  - model: ./math
    parameters: {weight: 1.0, density: 0.5, epsilon: 0.1}
  - model: ./code
    parameters: {weight: 1.0, density: 0.6, epsilon: 0.1}
parameters: {lambda: 1.1, normalize: true}
tokenizer:
  source: union
  tokens:
    <|im_start|>: {source: ./math, force: true}
  pad_to_multiple_of: 64
"""
NUSLERP = """
merge_method: nuslerp
models:
  - {model: ./math, parameters: {weight: [0.2, 0.8]}}
  - {model: ./code, parameters: {weight: 0.5}}
parameters: {nuslerp_flatten: false}
"""
HARC = """
merge_method: wudi
base_model: allenai/OLMoE-1B-7B-0125
models:
  - {model: ./math, name: math}
  - {model: ./code, name: code}
router: {merge_method: linear, parameters: {weight: 0.5}}
calibration:
  data: {math: math.jsonl, code: [code-1.jsonl, code-2.jsonl]}
  layers: last:4
  rtol: 1e-6
"""
MOE_FILTERS = """
merge_method: dare_linear
base_model: ./base
models:
  - model: ./math
    parameters:
      density: 0.4
      weight:
        - {filter: "role:router", value: 0}
        - {filter: experts.3., value: [0.1, 0.9]}
        - {filter: "role:expert", value: 0.5}
        - {value: 0.3}
"""
EXAMPLES = [TIES, DARE_TIES, SLERP, FRANKENMERGE, DELLA, NUSLERP, HARC, MOE_FILTERS]


def read(text):
    schemas = {name: METHODS.get(name).schema for name in METHODS}
    return check_document(read_document(text), schemas=schemas)


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda t: t.split("merge_method: ")[1].split()[0])
def test_loads_and_survives_writing(text):
    loaded = read(text)
    assert loaded.warnings == ()
    assert read(dump_config(loaded.config)).config == loaded.config
