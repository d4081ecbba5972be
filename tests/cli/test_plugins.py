"""`--plugin FILE.py`: methods, families and checks of the user's own."""

import json
import sys

import pytest
import torch
import yaml

import terminal
import zoo
from moemerge.checkpoint import Checkpoint
from repairs.calibration import cases

PLUGIN = '''
from typing import Annotated

from moemerge.families.families import add_family
from moemerge.families.rules import Family, GateRule, key
from moemerge.methods.method import Param, PerModel, merge_method
from moemerge.methods.wrappers import merge_wrapper


@merge_method("test_shares", base="member")
def shares(tensors, *, share: Annotated[PerModel[float], Param("how much", minimum=0)]):
    """Shares of models."""
    return sum(part * tensor for part, tensor in zip(share, tensors))


@merge_wrapper("test_halved")
def halved(inner, tensors, base):
    """Half of the change."""
    return base + 0.5 * (inner(tensors, base) - base)


add_family(Family(("test_family",), "Test", GateRule(top_k=key("num_experts_per_tok", default=2))))


def is_short(row, response):
    return len(response) < 5
'''


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "test_own_methods.py"
    path.write_text(PLUGIN, encoding="utf-8")
    yield path
    sys.modules.pop(path.stem, None)


def moemerge(*words):
    return terminal.succeed(*words).stdout


def test_a_method_of_ones_own_merges(plugin, zoo_folder, tmp_path):
    one, two = zoo_folder("olmoe"), zoo.perturb(zoo_folder("olmoe"), tmp_path / "two", 1)
    models = [
        {"model": str(one), "name": "one", "parameters": {"share": 0.25}},
        {"model": str(two), "name": "two", "parameters": {"share": 0.75}},
    ]
    config = tmp_path / "own.yml"
    config.write_text(yaml.safe_dump({"merge_method": "test_shares", "models": models}))
    assert "unknown merge method" in terminal.moemerge("validate", config).output
    moemerge("validate", config, "--plugin", plugin)
    moemerge("merge", config, tmp_path / "merged", "--plugin", plugin)
    moemerge("run", config, tmp_path / "ran", "--plugin", plugin, "--plugin", plugin)
    name = "model.norm.weight"
    a, b, merged, ran = (
        Checkpoint.open(f)[name] for f in (one, two, tmp_path / "merged", tmp_path / "ran")
    )
    torch.testing.assert_close(merged, 0.25 * a + 0.75 * b)
    assert torch.equal(merged, ran)


def test_what_a_plugin_brings_is_listed(plugin):
    methods = json.loads(moemerge("ls", "methods", "--json", "--plugin", plugin))
    assert "test_shares" in {row["method"] for row in methods}
    wrappers = json.loads(moemerge("ls", "wrappers", "--json", "--plugin", plugin))
    assert ("test_halved", "Half of the change.") in {
        (row["wrapper"], row["what_it_does"]) for row in wrappers
    }
    rows = json.loads(moemerge("ls", "architectures", "--json", "--plugin", plugin))
    assert rows[-1]["family"] == "test_family"
    schema = json.loads(moemerge("schema", "--plugin", plugin))
    assert "share" in schema["$defs"]["Parameters"]["properties"]


def test_a_family_of_ones_own_is_known(plugin, zoo_folder, tmp_path):
    folder = zoo.perturb(zoo_folder("olmoe"), tmp_path / "own", 1)
    zoo.edit_config(folder, model_type="test_family", architectures=["TestFamilyForCausalLM"])
    assert json.loads(moemerge("inspect", folder, "--json"))["family"] is None
    known = json.loads(moemerge("inspect", folder, "--json", "--plugin", plugin))
    assert (known["family"], known["experts"]) == ("Test", zoo.EXPERTS)


def test_a_function_of_a_plugin_judges(plugin):
    from moemerge.lab.verify import make_verifier

    moemerge("ls", "methods", "--plugin", plugin)
    verifier = make_verifier(f"{plugin.stem}:is_short")
    assert verifier.check({}, "yes").right
    assert not verifier.check({}, "certainly").right


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gone.py", None, "does not exist"),
        ("notes.txt", "", "is no Python file"),
        ("odd_plugin.py", "raise BaseException('odd')\n", "line 1: BaseException: odd"),
        ("broken_plugin.py", "x = 1\ny = x / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("wrong_plugin.py", "def (\n", "SyntaxError"),
        ("leaving_plugin.py", "import sys\nsys.exit(7)\n", "line 2: SystemExit: 7"),
        ("json.py", "", "the name of another module, 'json'"),
        ("yaml.py", "", "the name of another module, 'yaml'"),
    ],
)
def test_plugins_that_cannot_be_used(name, text, words, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    result = terminal.moemerge("ls", "methods", "--plugin", tmp_path / name)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no such thing')", "ValueError: no such thing"),
        ("return tensors[0][:1]", "the result is [1"),
        ("return None", "AttributeError"),
    ],
)
def test_a_method_that_fails_is_named_and_nothing_is_written(body, said, zoo_folder, tmp_path):
    plugin = tmp_path / "test_failing_methods.py"
    plugin.write_text(
        "from moemerge.methods.method import merge_method\n"
        "@merge_method('test_fails', base='member')\n"
        f"def fails(tensors):\n    'Fails.'\n    {body}\n"
    )
    config = tmp_path / "own.yml"
    models = [{"model": str(zoo_folder("olmoe"))}]
    config.write_text(yaml.safe_dump({"merge_method": "test_fails", "models": models}))
    words = ["merge", config, tmp_path / "out", "--plugin", plugin]
    before = sorted(tmp_path.iterdir())
    try:
        result = terminal.moemerge(*words)
    finally:
        sys.modules.pop(plugin.stem, None)
    assert result.exit_code == 2, result.output
    assert "merge method 'test_fails', " in result.output
    assert said in result.output
    assert "repair the plugin 'test_failing_methods'" in result.output
    assert sorted(path for path in tmp_path.iterdir() if path.name != "__pycache__") == before


def test_the_command_that_repeats_a_diagnosis_names_the_plugin(plugin, zoo_folder, tmp_path):
    (tmp_path / "case").mkdir()
    case = cases.make_case(zoo_folder("olmoe"), tmp_path / "case", rows=6)
    asked = ["diagnose", case.merged, "--device", "cpu", "--json", "-"]
    for name in case.sources:
        asked += ["--source", f"{name}={case.sources[name]}", "--data", f"{name}={case.data[name]}"]
    first, second = (
        json.loads(moemerge(*asked, *more))["command"] for more in ([], ["--plugin", plugin])
    )
    assert second == f"{first} --plugin {plugin}"
