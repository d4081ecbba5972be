"""Several merges in one file."""

import math

import pytest

import moemerge
from moemerge.config.stages import read_stages
from moemerge.config.yaml_lines import dump_document, read_yaml
from moemerge.conversion.compose import load_compose_config
from moemerge.errors import ConfigError
from moemerge.lab.settings import load_task
from moemerge.lab.study.plan import load_study


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("-1.5e+3", -1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("12", 12),
        ("010", 10),
        ("08", 8),
        ("0x1F", 31),
        ("-0b11", -3),
        ("1_000", 1000),
        ("+.inf", math.inf),
        ("true", True),
        ("yes", True),
        ("~", None),
        ("1:30", "1:30"),
        ("8-15", "8-15"),
        ("last:4", "last:4"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-6'", "1e-6"),
        ("e5", "e5"),
        ("1e", "1e"),
    ],
)
def test_scalars(text, value):
    read = read_yaml(f"a: {text}\nb: 1\n", "x.yml").data["a"]
    assert read == value
    assert type(read) is type(value)


def test_numbers_keep_their_type_when_written_back():
    data = {"a": "1e-6", "b": 1e-6, "c": "010", "d": "yes", "e": "1:30", "f": 3, "g": "2024-01-01"}
    assert read_yaml(dump_document(data), "x.yml").data == data


def test_lines_of_keys_and_entries():
    document = read_yaml("a: 1\n\nb:\n  - c: 2\n    d: [5,\n        6]\n  - e\n", "x.yml")
    assert document.line(("a",)) == 1
    assert document.line(("b",)) == 3
    assert document.line(("b", 0, "c")) == 4
    assert document.line(("b", 0, "d")) == 5
    assert document.line(("b", 0, "d", 1)) == 6
    assert document.line(("b", 1)) == 7
    assert document.line(("b", 0, "missing")) == 4
    assert document.line(("missing",)) == 1


def test_aliases_and_merge_keys_work():
    text = "base: &b {x: 1, y: 2}\nown:\n  <<: *b\n  y: 3\nsame: *b\n"
    document = read_yaml(text, "x.yml")
    assert document.data == {
        "base": {"x": 1, "y": 2},
        "own": {"x": 1, "y": 3},
        "same": {"x": 1, "y": 2},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\nb: 2\n", "x.yml, line 2, column 2: not valid YAML"),
        ("a:\n\t- 1\n", "no tabs"),
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "got a list"),
        ("hello\n", "got a single value"),
        ("a: 1\n---\nb: 2\n", "holds 2 documents"),
        (
            "a: 1\nb: 2\na: 3\n",
            "line 3, column 1: not valid YAML: while constructing a mapping, fou",
        ),
        ("a: 1\n1: x\n", "the key 1 is not text: put it in quotes"),
        ("a: " + "9" * 4400, "not valid YAML"),
        ("a: 0x_", "not valid YAML"),
        ("a: !!python/object:os.system x\n", "x.yml, line 1: a: the tag"),
        ("a: !mine {b: 1}\n", "is not allowed in a config"),
        ("a: *nowhere\n", "undefined alias"),
        ("? [a, b]\n: 1\n", "is not text"),
        ("a: \x00\n", "not valid YAML"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
)
def test_what_is_no_config_is_refused_in_our_words(text, said):
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "x.yml")
    assert said in str(caught.value)
    assert str(caught.value).startswith("x.yml")


KINDS = {
    "merge": (moemerge.load_config, "merge_method: linear\nmodels: [{model: a}]\n"),
    "compose": (load_compose_config, "gate_mode: random\nexperts: [{source_model: a}]\n"),
    "study": (load_study, "merges: {}\nevaluate: {}\n"),
    "evaluate": (load_task, "title: t\nverify: exact\n"),
}


@pytest.mark.parametrize("read", KINDS)
@pytest.mark.parametrize("given", KINDS)
def test_files_of_another_kind_are_recognised(read, given, tmp_path):
    path = tmp_path / "file.yml"
    path.write_text(KINDS[given][1])
    try:
        KINDS[read][0](path)
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
    if given == read:
        assert "this is" not in message
        return
    assert message.startswith(f"{path}: this is a ")
    first, second = message.splitlines()
    assert f"`moemerge {given}`" in first
    assert "(line " in first
    assert f"`moemerge {read}`" in second


def test_aliases_cannot_fill_the_memory():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for i in range(1, 12):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    with pytest.raises(ConfigError, match="counting what aliases repeat"):
        read_yaml("\n".join(lines), "x.yml")


def test_an_empty_second_document_does_no_harm():
    assert read_yaml("---\na: 1\n---\n", "x.yml").data == {"a": 1}


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


def test_stages_are_ordered_by_use_and_placed():
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
def test_faults(old, new, message):
    with pytest.raises(ConfigError, match=message):
        read_stages(FILE.replace(old, new))
