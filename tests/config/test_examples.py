"""Configs as mergekit users write them, against the methods that exist."""

from __future__ import annotations

import pytest

import moemerge.merging.methods  # noqa: F401  (fills METHODS)
from moemerge.config.dump import dump_config
from moemerge.config.load import LoadedConfig, load_config
from moemerge.config.parameters import MethodSchema
from moemerge.merging.method import METHODS

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
LINEAR = """
models:
  - model: psmathur/orca_mini_v3_13b
    parameters: {weight: 1.0}
  - model: WizardLM/WizardMath-13B-V1.0
    parameters: {weight: 0.3}
  - model: garage-bAInd/Platypus2-13B
    parameters: {weight: 0.5}
merge_method: linear
dtype: float16
tokenizer_source: union
"""
TASK_ARITHMETIC = """
base_model: ./base
models:
  - {model: ./math, parameters: {weight: 0.3}}
  - {model: ./code+./lora, parameters: {weight: 0.4}}
merge_method: task_arithmetic
parameters: {lambda: 0.9, normalize: false}
out_dtype: torch.bfloat16
chat_template: auto
"""
MODEL_STOCK = """
models:
  - model: mistralai/Mistral-7B-v0.1
  - model: a/one@main
  - model: b/two
merge_method: model_stock
base_model: mistralai/Mistral-7B-v0.1
dtype: bfloat16
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
BREADCRUMBS = """
merge_method: breadcrumbs_ties
base_model: ./base
models:
  - {model: ./math, parameters: {weight: 0.5, density: 0.9, gamma: 0.01}}
  - {model: ./code, parameters: {weight: 0.5, density: 0.9, gamma: 1e-2}}
"""
SCE = """
merge_method: sce
base_model: ./base
models: [{model: ./math}, {model: ./code}]
parameters: {select_topk: 0.8}
"""
NUSLERP = """
merge_method: nuslerp
models:
  - {model: ./math, parameters: {weight: [0.2, 0.8]}}
  - {model: ./code, parameters: {weight: 0.5}}
parameters: {nuslerp_flatten: false}
"""
MULTISLERP = """
merge_method: multislerp
models:
  - {model: ./math, parameters: {weight: 0.5}}
  - {model: ./code, parameters: {weight: 0.5}}
"""
KARCHER = """
merge_method: karcher
models: [{model: ./math}, {model: ./code}, {model: ./chat}]
parameters: {max_iter: 20, tol: 1e-6}
"""
NEARSWAP = """
merge_method: nearswap
base_model: ./base
models: [{model: ./base}, {model: ./math}]
parameters: {t: 1e-4}
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
EXAMPLES = [
    TIES,
    DARE_TIES,
    SLERP,
    FRANKENMERGE,
    LINEAR,
    TASK_ARITHMETIC,
    MODEL_STOCK,
    DELLA,
    BREADCRUMBS,
    SCE,
    NUSLERP,
    MULTISLERP,
    KARCHER,
    NEARSWAP,
    HARC,
    MOE_FILTERS,
]


def read(text: str) -> LoadedConfig:
    schemas: dict[str, MethodSchema] = {name: METHODS.get(name).schema for name in METHODS}
    return load_config(text, schemas=schemas)


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda t: t.split("merge_method: ")[1].split()[0])
def test_loads_and_survives_writing(text: str) -> None:
    loaded = read(text)
    assert loaded.warnings == ()
    assert read(dump_config(loaded.config)).config == loaded.config
