"""Signs of quantised weights in a config and in tensor headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moemerge.architectures.reading import Header

_FLOAT8 = ("float8_e4m3", "float8_e5m2")
_QUANTISED_ENDS = {
    "_blocks": "MXFP4 blocks",
    "weight_scale_inv": "block-scaled weights",
    "weight_scale": "scaled weights",
    ".qweight": "packed integer weights (GPTQ or AWQ)",
    "weight_packed": "packed weights",
    ".quant_map": "bitsandbytes weights",
}


def find_quantised(
    configs: Iterable[Mapping[str, Any]], tensors: Mapping[str, Header]
) -> str | None:
    """What was found, in words; None for plain floats."""
    for config in configs:
        section = config.get("quantization_config")
        if isinstance(section, Mapping):
            return f"quantization_config: {_method_in_words(section)}"
    descriptions = (_quantised_tensor(name, header) for name, header in tensors.items())
    return next((words for words in descriptions if words), None)


def _method_in_words(section: Mapping[str, Any]) -> str:
    """Its name, and that of the format where one method has several."""
    sparsity = section.get("sparsity_config")
    named = [
        section.get("format"),
        sparsity.get("format") if isinstance(sparsity, Mapping) else None,
    ]
    words = [str(section.get("quant_method", "unnamed method"))]
    return ", ".join([*words, *(name for name in named if isinstance(name, str))])


def _quantised_tensor(name: str, header: Header) -> str | None:
    if str(header.dtype).startswith(_FLOAT8):
        return f"{header.dtype} tensors ({name})"
    for end, words in _QUANTISED_ENDS.items():
        if name.endswith(end):
            return f"{words} ({name})"
    return None
