"""Layer selections and references to models."""

import pytest

from moemerge.config.fields import LayerSelection
from moemerge.config.models import ModelRef
from moemerge.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        ("all", (0, 1, 2, 3, 4, 5)),
        ("last:2", (4, 5)),
        ("last:6", (0, 1, 2, 3, 4, 5)),
        ("2-4", (2, 3, 4)),
        ("3", (3,)),
        (3, (3,)),
        ("0, 2, 4-5", (0, 2, 4, 5)),
        ([5, "0-1", 0], (0, 1, 5)),
    ],
)
def test_selects(value, layers):
    selection = LayerSelection.parse(value)
    assert selection.resolve(6) == layers
    assert LayerSelection.parse(str(selection)) == selection


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("last:0", "selects none"),
        ("5-2", "runs backwards"),
        ("first:2", "cannot read 'first:2'"),
        ("", "cannot read ''"),
        ("1,,2", "cannot read ''"),
        ("-1", "cannot read '-1'"),
        (True, "not True"),
        (1.5, "not 1.5"),
        ([], "cannot read"),
    ],
)
def test_refuses_what_names_no_layer(value, said):
    with pytest.raises(UsageError) as caught:
        LayerSelection.parse(value)
    assert said in str(caught.value)


@pytest.mark.parametrize("value", ["last:7", "4-6", "6", "0,9"])
def test_layers_beyond_the_model_are_refused_with_its_size(value):
    with pytest.raises(UsageError, match="6 layers, 0 to 5"):
        LayerSelection.parse(value).resolve(6)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name", ("org/name", None, None, None)),
        ("org/name@main", ("org/name", "main", None, None)),
        ("./a+./b", ("./a", None, "./b", None)),
        ("org/a@v1+org/b@v2", ("org/a", "v1", "org/b", "v2")),
        ("org/a+org/b@v2", ("org/a", None, "org/b", "v2")),
        ("a+b@v#in_out,rank_major", ("a", None, "b", "v", "in_out,rank_major")),
    ],
)
def test_reads_and_writes_references(text, parts):
    ref = ModelRef.parse(text)
    assert ref == ModelRef(*parts)
    assert str(ref) == text
    assert len({ref, ModelRef.parse(f" {text} ")}) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a@b@c", "more than one '@'"),
        ("a+b+c", "more than one '+'"),
        ("a+", "lacks a name"),
        ("@main", "lacks a name"),
        ("a@", "lacks a name"),
        ("", "lacks a name"),
    ],
)
def test_refuses_unclear_references(text, said):
    with pytest.raises(ConfigError, match="path\\[@revision\\]") as caught:
        ModelRef.parse(text)
    assert said in str(caught.value)


def test_an_existing_folder_is_taken_as_it_is(tmp_path):
    for name in ("model@home", "c++", "x+y@z", "base@1"):
        (tmp_path / name).mkdir()
        assert ModelRef.parse(str(tmp_path / name)) == ModelRef(str(tmp_path / name))
    pair = ModelRef.parse(f"{tmp_path}/c+++org/lora@v1")
    assert pair == ModelRef(f"{tmp_path}/c++", None, "org/lora", "v1")
    revised = ModelRef.parse(f"{tmp_path}/base@1@v2")
    assert revised == ModelRef(f"{tmp_path}/base@1", "v2")


def test_mapping_forms():
    assert ModelRef.from_mapping({"path": "a", "revision": "v"}) == ModelRef("a", "v")
    assert ModelRef.from_mapping({"model": {"path": "a@b"}}) == ModelRef("a@b")
    assert ModelRef.from_mapping(
        {"model": {"path": "a", "revision": "v"}, "lora": "l@w"}
    ) == ModelRef("a", "v", "l", "w")
    laid = ModelRef.from_mapping({"model": "a", "lora": {"path": "l", "layout": "in_out"}})
    assert laid == ModelRef("a", lora="l", lora_layout="in_out") == ModelRef.parse(str(laid))
    for layout in ("", "out", "in_out,out_in", 3):
        with pytest.raises(ConfigError, match="is not a LoRA layout"):
            ModelRef.from_mapping({"model": "a", "lora": {"path": "l", "layout": layout}})
    with pytest.raises(ConfigError, match="needs a `path`"):
        ModelRef.from_mapping({"model": {"revision": "v"}})
    with pytest.raises(ConfigError, match="must be text, not 7"):
        ModelRef.from_mapping({"path": "a", "revision": 7})
    with pytest.raises(ConfigError, match="must be text, not ''"):
        ModelRef.from_mapping({"path": "a", "revision": ""})


def test_label_is_the_last_component():
    assert ModelRef.parse("org/name@v1").label == "name"
    assert ModelRef.parse("./out/math/").label == "math"
    assert ModelRef.parse("org/base@v1+./loras/math").label == "base+math"
