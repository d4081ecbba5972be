import pytest

from moemerge.config.models import ModelRef
from moemerge.config.parameter_values import TensorContext
from moemerge.config.schema import TokenSource
from moemerge.errors import ConfigError

NORM = ("model.norm.weight",)
ATTENTION = ("model.layers.1.self_attn.q_proj.weight",)
MLP = ("model.layers.1.mlp.up_proj.weight",)


def value(merge, name, names, source = None,
          *, index = 0, role = None, t = 0.0):  # fmt: skip
    (spec,) = (p for p in merge.schema.parameters if p.name == name)
    model = None if source is None else merge.slices[index].inputs[source].name
    return merge.reader.value(spec, TensorContext(index, names, role, t), model)


def layout(merge):
    return [([s.name for s in p.inputs], p.base.name if p.base else None) for p in merge.slices]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # a member base that is not listed joins at the end
        (
            "merge_method: linear\nbase_model: b\nparameters: {weight: 1}\nmodels: [{model: a}]\n",
            [(["a", "b"], None)],
        ),
        # one that is listed stays where it is
        (
            "merge_method: linear\nbase_model: b\nparameters: {weight: 1}\n"
            "models: [{model: b}, {model: a}]\n",
            [(["b", "a"], None)],
        ),
        # a base that differences are taken to stands apart, listed or not
        (
            "merge_method: ties\nbase_model: b\nparameters: {weight: 1}\nmodels: [{model: a}]\n",
            [(["a"], "b")],
        ),
        (
            "merge_method: ties\nbase_model: b\nparameters: {weight: 1}\n"
            "models: [{model: b}, {model: a}]\n",
            [(["a"], "b")],
        ),
        (
            "merge_method: nuslerp\nparameters: {weight: 1}\nmodels: [{model: a}, {model: c}]\n",
            [(["a", "c"], None)],
        ),
        (
            "merge_method: nuslerp\nbase_model: b\nparameters: {weight: 1}\n"
            "models: [{model: a}, {model: c}]\n",
            [(["a", "c"], "b")],
        ),
        # slices: a member base is not added, a base apart takes the shared range
        (
            "merge_method: passthrough\nbase_model: b\nslices:\n"
            "  - sources: [{model: a, layer_range: [0, 2]}]\n"
            "  - sources: [{model: b, layer_range: [1, 3]}]\n",
            [(["a"], None), (["b"], None)],
        ),
        (
            "merge_method: slerp\nbase_model: b\nparameters: {t: 0}\nslices:\n"
            "  - sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [1, 3]}]\n"
            "  - sources: [{model: a, layer_range: [2, 4]}]\n"
            "  - {base_model: a, sources: [{model: b, layer_range: [2, 4]}]}\n",
            [(["a"], "b"), (["a"], "b"), (["b"], "a")],
        ),
    ],
)
def test_bases_find_their_place(load, text, expected):
    assert layout(load(text).merge) == expected


def test_ranges_and_layers(load):
    text = (
        "merge_method: slerp\nbase_model: b\nparameters: {t: 0}\nslices:\n"
        "  - sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [1, 3]}]\n"
        "  - sources: [{model: a, layer_range: [2, 4]}]\n"
    )
    merge = load(text).merge
    assert [s.layer_range for s in merge.slices[0].models] == [(0, 2), (1, 3)]
    assert [s.layer_range for s in merge.slices[1].models] == [(2, 4), (2, 4)]
    assert list(merge.slices[0].models[1].layers(8)) == [1, 2]
    assert not merge.whole
    whole = load("merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: a}]\n").merge
    assert whole.whole
    assert list(whole.slices[0].inputs[0].layers(3)) == [0, 1, 2]


def test_names_are_made_unique_and_donor_is_found(load):
    text = (
        "merge_method: linear\nparameters: {weight: 1}\nmodels:\n"
        "  - model: x/math\n  - model: y/math\n  - {model: z/code, name: math-2}\n  - model: math\n"
    )
    merge = load(text).merge
    assert {name: str(model) for name, model in merge.models.items()} == {
        "math": "x/math",
        "math-3": "y/math",
        "math-2": "z/code",
        "math-4": "math",
    }
    assert merge.donor == ModelRef("x/math")
    assert merge.name_of(ModelRef("y/math")) == "math-3"
    assert load(text + "base_model: x/base\n").merge.donor == ModelRef("x/base")


SCOPES = """merge_method: ties
base_model: base
parameters:
  weight: 0.1
  density: 0.2
  lambda: 5
slices:
  - sources:
      - model: a
        layer_range: [0, 4]
        parameters:
          weight: [{filter: self_attn, value: [0, 1]}]
      - model: b
        layer_range: [0, 4]
    parameters: {density: [{filter: mlp, value: 0.3}], lambda: [{filter: norm, value: 7}]}
  - sources: [{model: a, layer_range: [4, 8]}, {model: b, layer_range: [4, 8]}]
"""


@pytest.mark.parametrize(
    ("name", "names", "source", "index", "t", "expected"),
    [
        ("weight", ATTENTION, 0, 0, 0.25, 0.25),  # the model's own filter
        ("weight", MLP, 0, 0, 0.25, 0.1),  # passed by: the top
        ("weight", ATTENTION, 1, 0, 0.25, 0.1),
        ("weight", ATTENTION, 0, 1, 0.25, 0.1),  # another slice
        ("density", MLP, 0, 0, 0.0, 0.3),  # the slice
        ("density", ATTENTION, 0, 0, 0.0, 0.2),
        ("density", MLP, 0, 1, 0.0, 0.2),
        ("lambda", NORM, None, 0, 0.0, 7.0),
        ("lambda", MLP, None, 0, 0.0, 5.0),
        ("normalize", MLP, None, 0, 0.0, True),  # the default
    ],
)
def test_order_of_scopes(load, name, names, source, index, t, expected):
    found = value(load(SCOPES).merge, name, names, source, index=index, t=t)
    assert found == expected
    assert type(found) is type(expected)


def test_a_module_stands_between_slice_and_top(load):
    text = """merge_method: ties
base_model: base
parameters: {weight: 1, density: 0.5, lambda: 2}
modules:
  default:
    parameters: {density: 0.25, lambda: [{filter: mlp, value: 3}]}
    models:
      - {model: a, parameters: {weight: 4}}
      - {model: b}
"""
    merge = load(text).merge
    assert value(merge, "weight", MLP, 0) == 4
    assert value(merge, "weight", MLP, 1) == 1
    assert value(merge, "density", MLP, 0) == 0.25
    assert value(merge, "lambda", MLP) == 3
    assert value(merge, "lambda", NORM) == 2


def test_booleans_count_as_numbers_and_back(load):
    text = "merge_method: linear\nparameters: {weight: true, normalize: 0}\nmodels: [{model: a}]\n"
    merge = load(text).merge
    assert value(merge, "weight", MLP, 0) == 1.0
    assert value(merge, "normalize", MLP) is False


def test_a_default_of_none_is_a_value(load):
    merge = load("merge_method: passthrough\nmodels: [{model: a}]\n").merge
    assert value(merge, "scale", MLP, 0) is None


def test_filters_without_catch_all_name_the_tensor_they_miss(load):
    text = (
        "merge_method: linear\nmodels:\n  - model: x/a\n    parameters:\n"
        "      weight: [{filter: mlp, value: 1}]\n"
    )
    merge = load(text).merge
    assert value(merge, "weight", MLP, 0) == 1
    with pytest.raises(ConfigError) as caught:
        value(merge, "weight", NORM, 0)
    for part in ("'weight'", "'model.norm.weight'", "model 'a'", "catch-all", "- value: ..."):
        assert part in str(caught.value)


MEASURED = """merge_method: linear
parameters: {weight: 1}
slices:
  - sources:
      - {model: x, layer_range: [0, 2]}
      - model: y
        layer_range: [0, 2]
        parameters: {weight: [{filter: "*", value: [0, 1]}]}
  - sources:
      - {model: x, layer_range: [3, 4]}
      - {model: y, layer_range: [2, 3], parameters: {weight: [2, 3]}}
"""


@pytest.mark.parametrize(
    ("index", "t", "result"),
    [
        (0, 0.0, 3.0),  # embeddings: the first slice at t = 0
        (0, 1.0, 6.5),
        (1, 1.0, 8.25),  # a slice of one layer: t = 1
        (1, 0.0, 23 / 3),  # final norm and head: the last slice at t = 0
    ],
)
def test_gradients_give_what_mergekit_gave(load, index, t, result):
    """mergekit 0.1.5 on models filled with 3 (x) and 10 (y), run once as a black box."""
    merge = load(MEASURED).merge
    x, y = (float(str(value(merge, "weight", MLP, i, index=index, t=t))) for i in (0, 1))
    assert (3 * x + 10 * y) / (x + y) == pytest.approx(result)


ROUTER = """merge_method: ties
base_model: base
parameters: {density: 0.5, normalize: false}
models:
  - {model: a, parameters: {weight: 0.4}}
  - {model: b, parameters: {weight: 0.6}}
"""


def test_routers_by_another_method(load, schemas):
    merge = load(ROUTER + "router: {merge_method: linear}\n").merge
    reader = merge.router_reader
    assert merge.router_schema is schemas["linear"]
    gate = TensorContext(0, ("model.layers.0.mlp.gate.weight",), "router")
    # how much of each model is shared; `normalize` at the top belongs to the other method
    assert reader.values(gate, "a") == {"weight": 0.4}
    assert reader.values(gate) == {"normalize": True}
    own = load(ROUTER + "router: {merge_method: linear, parameters: {weight: 1, normalize: 0}}\n")
    assert own.merge.router_reader is not None
    assert own.merge.router_reader.values(gate, "b") == {"weight": 1.0}
    assert own.merge.router_reader.values(gate) == {"normalize": False}


def test_routers_method_may_need_its_own_parameters(load):
    text = "merge_method: wudi\nbase_model: base\nmodels: [{model: a}, {model: b}]\n"
    with pytest.raises(ConfigError, match=r"'linear' needs the parameter 'weight'.* for a, b"):
        load(text + "router: {merge_method: linear}\n")
    shared = load(text + "router: {merge_method: linear}\nparameters: {weight: 0.5}\n")
    assert shared.warnings == ()


BY_SLERP = "router: {merge_method: slerp, parameters: {t: 0.5}}\n"


def test_routers_method_sees_the_base_apart(load, schemas):
    text = "merge_method: linear\nbase_model: b\nparameters: {weight: 1}\n"
    merge = load(text + "models: [{model: a}]\n" + BY_SLERP).merge
    inputs, base = merge.slices[0].seen_by(schemas["slerp"])
    assert [s.name for s in inputs] == ["a"]
    assert base.name == "b"


def test_routers_are_averaged_with_the_base_where_the_rest_is(load, schemas):
    text = "base_model: b\nparameters: {weight: 1}\nmodels: [{model: a}]\n"
    for method, names in (("linear", ["a", "b"]), ("ties", ["a"])):
        merge = load(f"merge_method: {method}\n" + text).merge
        inputs, base = merge.slices[0].seen_by(schemas["linear"])
        assert ([s.name for s in inputs], base) == (names, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("merge_method: linear\nbase_model: a\nmodels: [{model: a}]\n", "got 0: none"),
        (
            "merge_method: linear\nbase_model: b\n"
            "slices: [{sources: [{model: a, layer_range: [0, 2]}]}]\n",
            "'slerp' of the routers needs the base: list b too",
        ),
    ],
)
def test_routers_method_lacks_models(load, text, said):
    with pytest.raises(ConfigError, match=said):
        load(text + "parameters: {weight: 1}\n" + BY_SLERP)


def test_an_optional_base_needs_its_own_range_too(load):
    text = (
        "merge_method: nuslerp\nbase_model: b\nparameters: {weight: 1}\nslices:\n"
        "  - sources: [{model: a, layer_range: [0, 2]}, {model: c, layer_range: [2, 4]}]\n"
    )
    with pytest.raises(ConfigError, match="list b with its own as well"):
        load(text)


def test_keeping_a_router(load):
    for given in ("b", "./b"):
        text = ROUTER.replace("model: b", "model: ./b") + f"router: {{keep: {given}}}\n"
        assert load(text).merge.router_keep == "b"
    assert load(ROUTER + "router: {keep: base}\n").merge.router_keep == "base"


NAMED = """merge_method: ties
base_model: org/base
parameters: {weight: 0.5}
models:
  - {model: org/math@v1, name: math}
  - {model: ./code}
"""


def test_tokenizer_source_and_names_are_resolved(load):
    config = load(NAMED + "tokenizer_source: math\nrouter: {keep: code}\n").config
    assert config.tokenizer_source is None
    assert config.tokenizer is not None
    assert config.tokenizer.source == ModelRef("org/math", "v1")
    assert config.router is not None
    assert config.router.keep == ModelRef("./code")


def test_tokens(load):
    text = """tokenizer:
  source: base
  tokens:
    <a>: {source: math, force: true}
    <b>: {source: {kind: zero}}
    <c>: {source: {kind: model_token, model: ./code, token_id: 3}}
    <d>: {source: {model: {path: ./code}}}
  pad_to_multiple_of: 64
"""
    settings = load(NAMED + text).config.tokenizer
    tokens = settings.tokens
    assert tokens["<a>"].source == ModelRef("org/math", "v1")
    assert tokens["<a>"].force
    assert tokens["<b>"].source == TokenSource(kind="zero")
    third = tokens["<c>"].source
    assert (third.model, third.token_id) == (ModelRef("./code"), 3)
    assert tokens["<d>"].source == ModelRef("./code")
    assert settings.pad_to_multiple_of == 64
