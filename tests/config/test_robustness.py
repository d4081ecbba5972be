"""Whatever stands anywhere in a config, the answer is a config or our own error."""

import copy

import pytest

from moemerge.config.dump import dump_config
from moemerge.config.faults import path_text
from moemerge.errors import ConfigError

FULL = {
    "merge_method": "ties",
    "base_model": {"model": {"path": "org/base", "revision": "v1"}},
    "models": [
        {"model": "org/math@v1", "name": "math", "parameters": {"weight": [0, 1]}},
        {
            "model": {"model": "org/code", "lora": {"path": "l", "revision": "r"}},
            "name": "code",
            "parameters": {"weight": [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}]},
        },
    ],
    "parameters": {"normalize": True, "lambda": 0.5, "density": {"filter": "mlp", "value": 0.5}},
    "dtype": "float32",
    "out_dtype": "bfloat16",
    "tokenizer": {
        "source": "math",
        "tokens": {
            "<a>": {"source": "math", "force": True},
            "<b>": {"source": {"kind": "model_token", "model": "math", "token_id": 3}},
        },
        "pad_to_multiple_of": 8,
    },
    "chat_template": "auto",
    "router": {"merge_method": "linear", "parameters": {"weight": 1}},
    "data": {"math": "m", "code": ["c", "d"]},
    "calibration": {"data": {"math": "m", "code": ["c"]}, "sources": ["math", "code"], "seed": 1},
}
SLICED = {
    "merge_method": "slerp",
    "base_model": "a",
    "slices": [
        {
            "sources": [
                {"model": "a", "layer_range": [0, 2]},
                {"model": "b", "layer_range": [1, 3]},
            ],
            "parameters": {"t": 0.5},
        },
        {"sources": [{"model": "b", "layer_range": [2, 4]}], "base_model": "b2"},
    ],
    "parameters": {"t": [0, 1]},
    "router": {"keep": "b"},
    "calibration": {"data": {"b": "f"}, "gamma": 0.5},
}
MODULAR = {
    "merge_method": "linear",
    "modules": {"default": {"models": [{"model": "a", "parameters": {"weight": 1}}]}},
}
JUNK = [
    None, True, -1, float("nan"), 10**400, "", "zzz", "a@b@c", [], {}, [None], {"value": {}},
    {3: 4}, ["math", "math"], object(),
]  # fmt: skip


def places(node, path=()):
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in items:
        yield (*path, key)
        if isinstance(child, (dict, list)):
            yield from places(child, (*path, key))


def changed(data, path, value, *, remove=False):
    result = copy.deepcopy(data)
    node = result
    for step in path[:-1]:
        node = node[step]
    if remove:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return result


@pytest.mark.parametrize("data", [FULL, SLICED, MODULAR], ids=["models", "slices", "modules"])
def test_the_untouched_configs_load(load, data):
    assert load(data).warnings == ()


@pytest.mark.parametrize(
    ("data", "lenient"),
    [(FULL, False), (SLICED, False), (SLICED, True), (MODULAR, True)],
    ids=["models", "slices", "slices-lenient", "modules-lenient"],
)
def test_junk_anywhere(load, data, lenient):
    refused = 0
    for path in places(data):
        cases = [changed(data, path, junk) for junk in JUNK]
        cases.append(changed(data, path, None, remove=True))
        for case in cases:
            try:
                loaded = load(case, lenient=lenient)
            except ConfigError as error:
                refused += 1
                said = str(error)
                assert "pydantic" not in said.lower(), (path_text(path), said)
                assert "Input should" not in said, (path_text(path), said)
                assert "Value error" not in said, (path_text(path), said)
            else:
                assert load(dump_config(loaded.config)).config == loaded.config, path_text(path)
    assert refused > 100
