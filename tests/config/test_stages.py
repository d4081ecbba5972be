"""Several merges in one file."""

from __future__ import annotations

import pytest

from moemerge.api.stages import read_stages
from moemerge.errors import ConfigError

FILE = """
merge_method: linear
models: [{model: second+lora}, {model: org/c}]
---
name: second
merge_method: slerp
base_model: first
models: [{model: {path: org/linear}}]
---
name: first
merge_method: linear
models: [{model: org/a}, {model: org/b}]
"""


def test_stages_are_ordered_by_use_and_placed() -> None:
    first, second, last = read_stages(FILE)
    assert [first.name, second.name, last.name] == ["first", "second", ""]
    assert "name" not in second.document.data
    assert second.placed({"first": "/x/first"}).data["base_model"] == "/x/first"
    models = last.placed({"second": "/x/second"}).data["models"]
    assert [entry["model"] for entry in models] == ["/x/second+lora", "org/c"]
    assert last.placed({"linear": "/x"}).data["merge_method"] == "linear"  # not a model


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: second\n", "", "two merges have no `name`"),
        ("name: second\n", "name: first\n", "two merges are named 'first'"),
        ("name: second\n", "name: ../x\n", "is not a word"),
        ("model: second+lora", "model: org/x", "no merge uses '\\(unnamed\\)' and 'second'"),
        ("model: org/a", "model: second", "the merges use each other: "),
    ],
)
def test_faults(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_stages(FILE.replace(old, new))
