"""Check single values of a config.json: types, ranges, and names that transformers must know."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from moemerge.registry import did_you_mean


def names(text: str) -> frozenset[str]:
    """Return the words of `text` as a set."""
    return frozenset(text.split())


# The names that transformers accepts. tests/forward/test_known_configs.py compares these tables
# with the installed release.
ACTIVATIONS: Final = names(
    "gelu gelu_10 gelu_fast gelu_new gelu_python gelu_pytorch_tanh gelu_python_tanh gelu_accurate "
    "hardswish laplace leaky_relu linear mish quick_gelu relu relu2 relu6 sigmoid silu "
    "sqrtsoftplus swish tanh prelu xielu"
)
ATTENTION: Final = names(
    "eager sdpa flex_attention flash_attention_2 flash_attention_3 flash_attention_4 "
    "paged|eager paged|sdpa paged|flash_attention_2 paged|flash_attention_3 "
    "paged|flash_attention_4"
)
EXPERTS: Final = names("eager batched_mm grouped_mm deepgemm sonicmoe")
DTYPES: Final = names("float16 half bfloat16 float32 float float64 double")
ROPE_TYPES: Final = names("default linear dynamic yarn longrope llama3 proportional")
# Only image, video and audio encoders rotate by position on several axes.
ENCODER_ROPE_TYPES: Final = frozenset({"axial", "mrope"})
SCALED_ROPE_TYPES: Final = frozenset({"linear", "dynamic", "yarn", "llama3"})

_ROPE_NUMBERS: Final = (
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
)

# The types that transformers accepts, by model type and key; made by tools/config_types.py.
TYPES_FILE: Final = Path(__file__).with_name("config_types.json")
_WORDS: Final[Mapping[str, str]] = {
    "int": "a whole number",
    "float": "a finite number with a decimal point",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "dict": "a mapping",
    "null": "null",
}
_JSON_TYPES: Final[Mapping[type, str]] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    list: "list",
    dict: "dict",
    type(None): "null",
}
_POSITIVE_INTEGERS = re.compile(
    r"^(vocab_size|hidden_size|num_hidden_layers|num_attention_heads|max_position_embeddings"
    r"|intermediate_size|decoder_sparse_step)$"
)
_POSITIVE_OR_NULL = re.compile(r"^num_key_value_heads$")
_SIZES_OR_NULL = re.compile(r"^head_dim$")
_INTEGERS_OR_NULL = re.compile(r"^(num_experts_per_tok|sliding_window|\w+_lora_rank|\w+_head_dim)$")
# One number, or one for each layer.
_COUNTS = re.compile(r"^(moe_intermediate_size|num_experts|num_local_experts|n_routed_experts)$")
# Far below 1, the angles of later tokens are infinite in float32.
_ROPE_BASES = re.compile(r"^(rope_theta|rope_local_base_freq)$")
_NORM_EPS = re.compile(r"(^|_)norm_eps(ilon)?$")
# Every release of transformers adds names of layer types; all have one of these words.
_LAYER_TYPE = re.compile(r"attention|sparse|dense|moe|conv|hybrid|mamba|recurrent|linear|full")
_NAMES: Final[Mapping[str, frozenset[str]]] = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
    "experts_implementation": EXPERTS,
    "_experts_implementation": EXPERTS,
    "dtype": DTYPES,
    "torch_dtype": DTYPES,
}
_TOKENS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")
# Sections whose values mean something else.
_SKIPPED: Final = frozenset({"quantization_config", "task_specific_params", "auto_map"})


def value_faults(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value that transformers cannot use; `text` is the text section."""
    for name, value, section, kind in _values(config):
        for expected in (
            _expected_type(name, value, section),
            _expected_name(name, value),
            _expected_by_class(name, value, kind),
        ):
            if expected is not None:
                yield f"{name} is {value!r:.80}, expected {expected}"
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            yield from _rope_faults(name, value, section is text)
    yield from _token_faults(text)


def _values(
    section: Mapping[str, Any], outer: str = ""
) -> Iterator[tuple[str, Any, Mapping[str, Any], str]]:
    """Yield every key and value at any depth, with the section that holds it and its type."""
    kind = section.get("model_type") or outer
    for name, value in section.items():
        if name in _SKIPPED:
            continue
        yield name, value, section, str(kind)
        if isinstance(value, Mapping):
            yield from _values(value, f"{kind}.{name}")


Test = Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(_is_integer(item) and item >= 0 for item in values)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or _is_float(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and bool(value > 0)


def _are_layer_types(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return all(isinstance(kind, str) and _LAYER_TYPE.search(kind) for kind in kinds)


def _or_null(test: Test) -> Test:
    return lambda value: value is None or test(value)


_TYPES: Final[tuple[tuple[re.Pattern[str], Test, str], ...]] = (
    (_POSITIVE_INTEGERS, lambda v: _is_integer(v) and v > 0, "a positive whole number"),
    (_POSITIVE_OR_NULL, _or_null(lambda v: _is_integer(v) and v > 0), "a positive whole number"),
    (_SIZES_OR_NULL, _or_null(lambda v: _is_integer(v) and v >= 0), "a whole number"),
    (_INTEGERS_OR_NULL, _or_null(_is_integer), "a whole number"),
    (_COUNTS, _is_count, "a whole number"),
    (_ROPE_BASES, lambda v: _is_number(v) and v >= 1, "a finite number of at least 1"),
    (_NORM_EPS, lambda v: _is_float(v) and v > 0, "a positive finite number with a decimal point"),
    (re.compile(r"^(mlp_)?layer_types$"), _or_null(_are_layer_types), "a list of layer types"),
    (
        re.compile(r"^rope_(parameters|scaling)$"),
        lambda v: v is None or isinstance(v, Mapping),
        "a mapping of rotary parameters",
    ),
)


def _expected_type(name: str, value: object, section: Mapping[str, Any]) -> str | None:
    """Return what was expected if the value has a wrong type or range."""
    if value is None and _NORM_EPS.search(name):
        # Some configs carry the key of another norm along, as null.
        set_keys = [key for key, other in section.items() if other is not None]
        return None if any(map(_NORM_EPS.search, set_keys)) else "a positive finite number"
    for pattern, test, expected in _TYPES:
        if pattern.search(name):
            return None if test(value) else expected
    return None


@cache
def _types() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(TYPES_FILE.read_bytes())["types"]
    return found


def class_types(kind: str | None) -> dict[str, str]:
    """Return the types that the config class of a model type accepts, by key."""
    return _types().get(kind or "", {})


def _expected_by_class(name: str, value: object, kind: str) -> str | None:
    """Return what was expected if the config class of transformers has another type."""
    known = class_types(kind)
    if name == "head_dim" and value is None and known and name not in known:
        return "a whole number, or no such key"  # the model code reads null as its size
    kinds = known.get(name, "").split("|")
    if kinds == [""] or name in _TOKENS:
        return None
    if _JSON_TYPES[type(value)] in kinds and (not isinstance(value, float) or _is_float(value)):
        return None
    return " or ".join(_WORDS[kind] for kind in kinds)


def _expected_name(name: str, value: object) -> str | None:
    """Return what was expected if transformers does not know the name."""
    known = _NAMES.get(name)
    if known is None or value is None:
        return None
    if isinstance(value, Mapping) and name.endswith("implementation"):  # one for each section
        return next(filter(None, (_expected_name(name, item) for item in value.values())), None)
    if not isinstance(value, str):
        return "a name"
    if name.lstrip("_") == "attn_implementation" and "/" in value:
        return None  # a kernel of the hub
    short = value.removeprefix("torch.") if known is DTYPES else value
    if short in known:
        return None
    return f"a name that transformers knows{did_you_mean(short, sorted(known))}"


def _rope_faults(name: str, rope: Mapping[str, Any], inside_text: bool) -> Iterator[str]:
    """Check one set of rotary parameters, or one for each layer type."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        for kind, inner in rope.items():
            if isinstance(inner, Mapping):
                yield from _rope_faults(f"{name}.{kind}", inner, inside_text)
            elif inner is not None:
                yield f"{name}.{kind} is {inner!r:.80}, expected a mapping of rotary parameters"
        return
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = ROPE_TYPES if inside_text else ROPE_TYPES | ENCODER_ROPE_TYPES
    if "mrope_section" in rope:
        known |= {"mrope"}
    if not isinstance(kind, str) or kind not in known:
        yield f"{name}: rope_type is {kind!r:.80}, expected one of {', '.join(sorted(known))}"
        return
    factor = rope.get("factor")
    if kind in SCALED_ROPE_TYPES and not _is_positive(factor):
        yield f"{name}: factor is {factor!r:.80}, expected a positive finite number"
    for key in _ROPE_NUMBERS:
        value = rope.get(key)
        if value is not None and not (_is_number(value) and value >= 0):
            yield f"{name}: {key} is {value!r:.80}, expected a finite number of at least 0"


def _token_faults(text: Mapping[str, Any]) -> Iterator[str]:
    """Check that token ids are in the vocabulary; many models store -1 for none."""
    rows: Any = text.get("vocab_size")
    for name in _TOKENS:
        value: Any = text.get(name)
        several = isinstance(value, list) and name == "eos_token_id"
        for token in value if several else [value]:
            if token is None:
                continue
            if not _is_integer(token):
                yield f"{name} is {value!r:.80}, expected a token id"
            elif _is_integer(rows) and not -1 <= token < rows:
                yield f"{name} is {token}, but the vocabulary has {rows} tokens (vocab_size)"
