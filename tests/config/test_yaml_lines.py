"""Several merges in one file."""

import json
import math

import pytest
import yaml

import moemerge
from moemerge.api.stages import read_stages
from moemerge.config.yaml_lines import Dumper, read_yaml
from moemerge.conversion.composing.job import load_compose_config
from moemerge.errors import ConfigError
from moemerge.lab.evaluation.settings import load_task
from moemerge.lab.experiments.study_file import load_study


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


@pytest.mark.parametrize("text", ["9" * 4400, "0x" + "f" * 5000])
def test_numbers_that_python_cannot_print_are_refused(text):
    with pytest.raises(ConfigError, match="line 1, column 4: not valid YAML"):
        read_yaml(f"a: {text}\n", "x.yml")


def test_numbers_keep_their_type_when_written_back():
    data = {"a": "1e-6", "b": 1e-6, "c": "010", "d": "yes", "e": "1:30", "f": 3, "g": "2024-01-01"}
    assert read_yaml(yaml.dump(data, Dumper=Dumper), "x.yml").data == data


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


def test_duplicate_and_non_text_keys_are_problems():
    document = read_yaml("a: 1\nb: {c: 1, c: 2}\na: 3\n1: x\n", "x.yml")
    assert [(p.path, p.message) for p in document.faults] == [
        (("a",), "given twice, on lines 1 and 3"),
        (("b", "c"), "given twice, on lines 2 and 2"),
        (("1",), "this key is read as int, not as text: put it in quotes"),
    ]


def test_aliases_and_merge_keys_work():
    text = "base: &b {x: 1, y: 2}\nown:\n  <<: *b\n  y: 3\nsame: *b\n"
    document = read_yaml(text, "x.yml")
    assert document.data == {
        "base": {"x": 1, "y": 2},
        "own": {"x": 1, "y": 3},
        "same": {"x": 1, "y": 2},
    }
    assert document.faults == []


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
        ("a: !!python/object:os.system x\n", "line 1, column 4"),
        ("a: !mine {b: 1}\n", "is not allowed in a config"),
        ("a: !!float\n", "'' is no float"),
        ("a: !!int\n", "'' is no int"),
        ("a: &x [*x]\n", "contains itself"),
        ("a: *nowhere\n", "undefined alias"),
        ("? [a, b]\n: 1\n", "a key must be a single word"),
        ("a: \x00\n", "not valid YAML"),
        ('a: "x\\udcff"\n', "half a character"),
        ('a: {b: "x\\0"}\n', "line 1, column 8: not valid YAML: a NUL character"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a: " + "{" * 200 + "}" * 200, "nested too deeply"),
    ],
)
def test_what_is_no_config_is_refused_in_our_words(text, said):
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "x.yml")
    assert said in str(caught.value)
    assert str(caught.value).startswith("x.yml")


def test_characters_of_two_escapes_are_joined():
    assert read_yaml(json.dumps({"a": "\U0001f600"}), "x.yml").data == {"a": "\U0001f600"}


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
    with pytest.raises(ConfigError, match="grows without end"):
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
