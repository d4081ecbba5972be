import pytest

from moemerge.config.faults import FaultsError, path_text
from moemerge.config.parameter_values import (
    ROLE_NAMES,
    Branch,
    Conditional,
    ParameterReader,
    Scopes,
    TensorContext,
    parse_value,
    plain,
)
from moemerge.config.parameters import BasePolicy, MethodSchema, ParameterSpec
from moemerge.families.roles import Role


def evaluate(value, names, role, t):
    """What a method gets; None when no filter matches."""
    spec = ParameterSpec("x", float, None, per_model=False, help="")
    schema = MethodSchema("m", "", BasePolicy.MEMBER, 1, None, (spec,))
    reader = ParameterReader(schema, Scopes(({},), ({},), ({"x": value},)))
    return reader.value(spec, TensorContext(0, names, role, t))


ATTENTION = ("model.layers.0.self_attn.q_proj.weight",)
MLP = ("model.layers.0.mlp.up_proj.weight",)
STACK = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.3.gate_proj.weight")


def test_roles_agree_with_the_architectures():
    assert tuple(role.value for role in Role) == ROLE_NAMES


CHOICE = parse_value(
    [
        {"filter": "self_attn", "value": [0, 1]},
        {"filter": "experts.3.", "value": 0.3},
        {"filter": "role:expert", "value": 0.4},
        {"filter": "mlp", "value": 0.5},
        {"filter": "*", "value": 0.6},
    ]
)


@pytest.mark.parametrize(
    ("names", "role", "expected"),
    [
        (ATTENTION, "attention", 0.25),
        (STACK, "expert", 0.3),
        (STACK[:1], "expert", 0.4),
        (STACK[:1], None, 0.5),
        (MLP, "mlp", 0.5),
        (("model.norm.weight",), "norm", 0.6),
    ],
)
def test_first_matching_filter_decides(names, role, expected):
    assert evaluate(CHOICE, names, role, 0.25) == expected


def test_gate_is_part_of_the_names_of_experts_too():
    value = parse_value([{"filter": "gate", "value": 1}, {"value": 2}])
    router = ("model.layers.0.mlp.gate.weight",)
    for names, role in ((router, "router"), (STACK, "expert"), (STACK[:1], "expert")):
        assert evaluate(value, names, role, 0.0) == 1
    value = parse_value([{"filter": "role:router", "value": 1}, {"value": 2}])
    assert evaluate(value, router, "router", 0.0) == 1
    assert evaluate(value, STACK, "expert", 0.0) == 2


def test_a_role_is_compared_whole():
    value = parse_value([{"filter": "role:expert", "value": 1}])
    assert evaluate(value, MLP, "shared_expert", 0.0) is None
    assert evaluate(value, ("role:expert.weight",), "mlp", 0.0) is None


@pytest.mark.parametrize("everything", ["*", None, ""])
def test_catch_alls(everything):
    value = parse_value([{"filter": everything, "value": 2}])
    assert value == Conditional((Branch(None, 2),))
    assert evaluate(value, MLP, None, 0.0) == 2


def test_one_mapping_counts_as_a_list_of_one():
    entry = {"filter": "mlp", "value": [0, 1]}
    assert parse_value(entry) == parse_value([entry])


@pytest.mark.parametrize(
    "raw", [0.5, True, "exact", [1.0, 2.0], plain(CHOICE), {"value": [1.0, 2.0]}]
)
def test_plain_is_the_inverse_of_parse(raw):
    value = parse_value(raw)
    assert parse_value(plain(value)) == value


@pytest.mark.parametrize(
    ("raw", "place", "said"),
    [
        (None, "", "expected a number"),
        ([], "", "an empty list has no value"),
        (float("nan"), "", "finite number"),
        (10**400, "", "expected a finite number, not 1000"),
        ([1, 10**400], "[1]", "a gradient is a list of numbers"),
        ([1, "x"], "[1]", "a gradient is a list of numbers, not 'x'"),
        ([1, float("inf")], "[1]", "a gradient is a list of numbers, not inf"),
        ([[1]], "[0]", "a gradient is a list of numbers"),
        ([1, {"value": 2}], "[0]", "like the other entries"),
        ([{"filter": "mlp"}], "[0]", "needs a `value`"),
        ([{"filtre": "mlp", "value": 1}], "[0].filtre", "did you mean 'filter'?"),
        ([{"filter": 3, "value": 1}], "[0].filter", "a filter is text, not 3"),
        ([{"filter": "role:ruter", "value": 1}], "[0].filter", "did you mean 'router'?"),
        ([{"filter": "role:zzz", "value": 1}], "[0].filter", "known here: router, "),
        ([{"value": [{"value": 1}]}], "[0].value", "cannot be nested"),
        ([{"value": 1}, {"filter": "a", "value": 2}], "[1]", "never used"),
        ({"value": [1, "x"]}, "value[1]", "not 'x'"),
    ],
)
def test_faults_are_placed(raw, place, said):
    with pytest.raises(FaultsError) as caught:
        parse_value(raw)
    (problem,) = caught.value.faults
    assert path_text(problem.path) == place
    assert said in problem.message
