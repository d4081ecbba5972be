from __future__ import annotations

from collections.abc import Callable

import pytest

from moemerge.config.load import LoadedConfig
from moemerge.config.models import ModelRef
from moemerge.config.schema import TokenSource

Load = Callable[..., LoadedConfig]

HEAD = """merge_method: ties
base_model: org/base
parameters: {weight: 0.5}
models:
  - {model: org/math@v1, name: math}
  - {model: ./code}
"""


def test_tokenizer_source_and_names_are_resolved(load: Load) -> None:
    config = load(HEAD + "tokenizer_source: math\nrouter: {keep: code}\n").config
    assert config.tokenizer_source is None
    assert config.tokenizer is not None
    assert config.tokenizer.source == ModelRef("org/math", "v1")
    assert config.router is not None
    assert config.router.keep == ModelRef("./code")


@pytest.mark.parametrize("source", ["union", "base"])
def test_tokenizer_words(load: Load, source: str) -> None:
    config = load(HEAD + f"tokenizer_source: {source}\n").config
    assert config.tokenizer is not None
    assert config.tokenizer.source == source


def test_tokens(load: Load) -> None:
    text = """tokenizer:
  source: base
  tokens:
    <a>: {source: math, force: true}
    <b>: {source: {kind: zero}}
    <c>: {source: {kind: model_token, model: ./code, token_id: 3}}
    <d>: {source: {model: {path: ./code}}}
  pad_to_multiple_of: 64
"""
    settings = load(HEAD + text).config.tokenizer
    assert settings is not None
    tokens = settings.tokens
    assert tokens["<a>"].source == ModelRef("org/math", "v1")
    assert tokens["<a>"].force
    assert tokens["<b>"].source == TokenSource(kind="zero")
    third = tokens["<c>"].source
    assert isinstance(third, TokenSource)
    assert (third.model, third.token_id) == (ModelRef("./code"), 3)
    assert tokens["<d>"].source == ModelRef("./code")
    assert settings.pad_to_multiple_of == 64


def test_calibration_pairs_models_with_text(load: Load) -> None:
    run = load(
        HEAD + "calibration: {data: {math: m.jsonl, code: [c.jsonl, d.jsonl]}}\n"
    ).calibration
    assert run is not None
    assert dict(run.sources) == {"math": ModelRef("org/math", "v1"), "code": ModelRef("./code")}
    assert dict(run.data) == {"math": ("m.jsonl",), "code": ("c.jsonl", "d.jsonl")}
    assert run.settings.alpha == 0.9


def test_calibration_takes_the_configs_own_data(load: Load) -> None:
    run = load(HEAD + "data: {math: m, code: c}\ncalibration: {gamma: 0.1}\n").calibration
    assert run is not None
    assert dict(run.data) == {"math": ("m",), "code": ("c",)}
    assert (run.settings.alpha, run.settings.gamma) == (None, 0.1)


def test_the_base_may_be_a_source_when_it_has_text(load: Load) -> None:
    run = load(HEAD + "calibration: {data: {math: m, code: c, base: b}}\n").calibration
    assert run is not None
    assert run.sources["base"] == ModelRef("org/base")


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ("[math]", {"math": ModelRef("org/math", "v1")}),
        ("{math: org/other}", {"math": ModelRef("org/other")}),
    ],
)
def test_sources_can_be_chosen(load: Load, sources: str, expected: dict[str, ModelRef]) -> None:
    text = HEAD + f"calibration: {{data: {{math: m}}, sources: {sources}}}\n"
    run = load(text).calibration
    assert run is not None
    assert dict(run.sources) == expected


def test_without_a_block_there_is_no_calibration(load: Load) -> None:
    assert load(HEAD).calibration is None
