"""The contract of a method, and methods that users bring."""

from typing import Annotated, Literal

import pytest
import torch

import moemerge
import zoo
from moemerge.config.parameters import REQUIRED
from moemerge.errors import ConfigError, UsageError
from moemerge.families.roles import Role
from moemerge.methods.method import METHODS, Param, PerModel, UnitInfo, merge_method
from processes import interpreter

PLUGIN = """
from moemerge import merge_method

@merge_method("plugged_in", base="member", elementwise=True)
def plugged_in(tensors, *, scale: float = 1.0):
    '''The first model, scaled.'''
    return tensors[0] * scale
"""


@pytest.fixture(scope="module", autouse=True)
def own_method():
    @merge_method("own_sum", base="required")
    def own_sum(
        tensors,
        base,
        weights: Annotated[PerModel[float], Param("share", minimum=0)],
        *,
        lambda_: Annotated[float, Param("factor")] = 2.0,
        kind: Annotated[Literal["sum", "first"], Param("what to do")] = "sum",
    ):
        """Weighted sum of the models, or the first."""
        if kind == "first":
            return tensors[0]
        return lambda_ * sum(w * t for w, t in zip(weights, tensors, strict=True))

    yield
    METHODS._entries.pop("own_sum")


def test_a_method_of_ones_own_is_checked_and_runs(tmp_path, zoo_folder):
    base = zoo_folder("olmoe")
    tuned = zoo.perturb(base, tmp_path / "tuned", 1)
    entry = {"model": str(tuned), "parameters": {"weight": 0.25}}
    config = {"merge_method": "own_sum", "base_model": str(base), "models": [entry]}
    moemerge.merge(config, tmp_path / "out")
    merged, inputs = zoo.tensors(tmp_path / "out"), zoo.tensors(tuned)
    for name, value in merged.items():
        torch.testing.assert_close(value, 0.5 * inputs[name])
    moemerge.merge({**config, "parameters": {"kind": "first"}}, tmp_path / "first")
    assert torch.equal(zoo.tensors(tmp_path / "first")[name], inputs[name])
    for wrong in ({"kind": "last"}, {"lamda": 1}, {"weight": -1}):
        with pytest.raises(ConfigError):
            moemerge.merge({**config, "parameters": wrong, "models": [{"model": str(tuned)}]}, "x")


def test_the_schema_is_read_from_the_signature():
    schema = METHODS.get("own_sum").schema
    weight, factor, kind = schema.parameters
    assert (weight.name, weight.per_model, weight.default) == ("weight", True, REQUIRED)
    assert (factor.name, factor.per_model, factor.default) == ("lambda", False, 2.0)
    assert kind.choices == ("sum", "first")
    assert schema.summary == "Weighted sum of the models, or the first."


def test_what_cannot_be_registered():
    with pytest.raises(UsageError, match="registered already"):
        merge_method("linear", base="member")(METHODS.get("linear").function)
    with pytest.raises(UsageError, match="docstring"):
        merge_method("silent", base="member")(lambda tensors: None)

    def lists(tensors, values: list[float]):
        """Use a type that YAML parameters do not have."""

    with pytest.raises(UsageError, match="use float, int, bool, str"):
        merge_method("lists", base="member")(lists)


def test_streams_depend_on_unit_seed_and_salt_alone():
    unit = UnitInfo("a.weight", Role.MLP, seed=3)
    assert unit.stream(0) == UnitInfo("a.weight", Role.EXPERT, seed=3).stream(0)
    others = {
        unit.stream(1),
        UnitInfo("b.weight", Role.MLP, 3).stream(0),
        UnitInfo("a.weight", Role.MLP, 4).stream(0),
    }
    assert unit.stream(0) not in others
    assert len(others) == 3
    assert unit.stream(0) == 8283151766107588190  # results must not change between versions


def test_entry_points_bring_methods(tmp_path):
    """A package that names its module as an entry point is loaded by every command."""
    (tmp_path / "plug.py").write_text(PLUGIN)
    info = tmp_path / "plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[moemerge.methods]\nmine = plug\n")
    code = "import moemerge.api as a; print([m['method'] for m in a.list_methods()])"
    env = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    result = interpreter("-c", code, env=env)
    assert "plugged_in" in result.stdout, result.stderr
    (tmp_path / "plug.py").write_text("import nowhere_to_be_found")
    result = interpreter("-m", "moemerge", "ls", "methods", env=env)
    assert result.returncode == 2
    assert "plugin 'mine'" in result.stderr
