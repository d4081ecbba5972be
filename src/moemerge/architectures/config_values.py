"""Check single values of a config.json: types, ranges, and names that transformers must know."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from moemerge.registry import did_you_mean


def names(text: str) -> frozenset[str]:
    """Return the words of `text` as a set."""
    return frozenset(text.split())


# The names that transformers accepts. tests/features/test_known_configs.py compares these tables
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
DTYPES: Final = names("auto float16 half bfloat16 float32 float float64 double")
ROPE_TYPES: Final = names("default linear dynamic yarn longrope llama3 proportional")
# Only image, video and audio encoders rotate by position on several axes.
ENCODER_ROPE_TYPES: Final = frozenset({"axial", "mrope"})
SCALED_ROPE_TYPES: Final = frozenset({"linear", "dynamic", "yarn", "llama3"})

_POSITIVE_INTEGERS = re.compile(
    r"^(vocab_size|hidden_size|num_hidden_layers|num_attention_heads|max_position_embeddings"
    r"|intermediate_size|decoder_sparse_step)$"
)
_INTEGERS_OR_NULL = re.compile(
    r"^(num_key_value_heads|head_dim|num_experts_per_tok|sliding_window|\w+_lora_rank|\w+_head_dim)$"
)
# One number, or one for each layer.
_COUNTS = re.compile(r"^(moe_intermediate_size|num_experts|num_local_experts|n_routed_experts)$")
# Far below 1, the angles of later tokens are infinite in float32.
_ROPE_BASES = re.compile(r"^(rope_theta|rope_local_base_freq)$")
_NORM_EPS = re.compile(r"(^|_)norm_eps(ilon)?$")
# transformers refuses whole numbers here.
_FLOATS = re.compile(r"^(initializer_range|router_jitter_noise)$")
_FLOATS_OR_NULL = re.compile(r"^router_aux_loss_coef$")
_NUMBERS_OR_NULL = re.compile(r"^(attention_dropout|clip_qkv|routed_scaling_factor)$")
# Every release of transformers adds names of layer types; all have one of these words.
_LAYER_TYPE = re.compile(r"attention|sparse|dense|moe|conv|hybrid|mamba|recurrent|linear|full")
_SWITCHES = re.compile(
    r"^(tie_word_embeddings|attention_bias|mlp_bias|use_cache|output_router_logits"
    r"|use_sliding_window)$"
)
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
# Sections whose values mean something else.
_SKIPPED: Final = frozenset({"quantization_config", "task_specific_params", "auto_map"})


def value_faults(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value that transformers cannot use; `text` is the text section."""
    for name, value, section in _values(config):
        for expected in (_expected_type(name, value, section), _expected_name(name, value)):
            if expected is not None:
                yield f"{name} is {value!r:.80}, expected {expected}"
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            yield from _rope_faults(name, value, section is text)
    yield from _token_faults(text)


def _values(section: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield every key and value at any depth, with the section that holds it."""
    for name, value in section.items():
        if name in _SKIPPED:
            continue
        yield name, value, section
        if isinstance(value, Mapping):
            yield from _values(value)


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
    (_INTEGERS_OR_NULL, _or_null(_is_integer), "a whole number"),
    (_COUNTS, _is_count, "a whole number"),
    (_ROPE_BASES, lambda v: _is_number(v) and v >= 1, "a finite number of at least 1"),
    (_NORM_EPS, lambda v: _is_float(v) and v > 0, "a positive finite number with a decimal point"),
    (_FLOATS, _is_float, "a finite number with a decimal point"),
    (_FLOATS_OR_NULL, _or_null(_is_float), "a finite number with a decimal point"),
    (_NUMBERS_OR_NULL, _or_null(_is_number), "a finite number"),
    (_SWITCHES, lambda v: isinstance(v, bool), "true or false"),
    (re.compile(r"^norm_topk_prob$"), lambda v: v is None or isinstance(v, bool), "true or false"),
    (re.compile(r"^(mlp_)?layer_types$"), _or_null(_are_layer_types), "a list of layer types"),
    (re.compile(r"^hidden_act$"), lambda v: isinstance(v, str), "a name"),
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


def _expected_name(name: str, value: object) -> str | None:
    """Return what was expected if transformers does not know the name."""
    known = _NAMES.get(name)
    if known is None or value is None:
        return None
    if isinstance(value, Mapping) and name.endswith("implementation"):  # one for each section
        return next(filter(None, (_expected_name(name, item) for item in value.values())), None)
    if not isinstance(value, str):
        return "a name" if name != "hidden_act" else None
    if name.lstrip("_") == "attn_implementation" and "/" in value:
        return None  # a kernel of the hub
    short = value.removeprefix("torch.") if known is DTYPES else value
    if short in known:
        return None
    return f"a name that transformers knows{did_you_mean(short, sorted(known))}"


def _rope_faults(name: str, rope: Mapping[str, Any], inside_text: bool) -> Iterator[str]:
    """Check one set of rotary parameters, or one for each layer type."""
    if rope and all(isinstance(value, Mapping) or value is None for value in rope.values()):
        for kind, inner in rope.items():
            yield from _rope_faults(f"{name}.{kind}", inner or {}, inside_text)
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


def _token_faults(text: Mapping[str, Any]) -> Iterator[str]:
    """Check that token ids are in the vocabulary; many models store -1 for none."""
    rows: Any = text.get("vocab_size")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value: Any = text.get(name)
        several = isinstance(value, list) and name == "eos_token_id"
        for token in value if several else [value]:
            if token is None:
                continue
            if not _is_integer(token):
                yield f"{name} is {value!r:.80}, expected a token id"
            elif _is_integer(rows) and not -1 <= token < rows:
                yield f"{name} is {token}, but the vocabulary has {rows} tokens (vocab_size)"
