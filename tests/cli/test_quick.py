"""Commands that only look do not wait for torch, transformers or numpy."""

import pytest

import zoo
from processes import environment, interpreter

# Runs a command, and tells on stderr which slow packages came in, and by which import of ours.
WATCHED = """
import importlib.abc, sys, traceback

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("torch", "transformers", "numpy"):
            ours = [f for f in traceback.extract_stack() if "moemerge" in f.filename]
            print(f"SLOW: {name} by {ours[-1].filename}: {ours[-1].line}", file=sys.stderr)

sys.meta_path.insert(0, Watch())
sys.argv = ["moemerge", *sys.argv[1:]]
from moemerge.cli import main
main()
"""


@pytest.fixture(scope="module")
def folder(zoo_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick")
    base = zoo_folder("olmoe")
    zoo.perturb(base, folder / "a", 1)
    (folder / "ties.yml").write_text(
        f"merge_method: ties\nbase_model: {base}\n"
        f"models: [{{model: {folder / 'a'}, parameters: {{weight: 1, density: 0.5}}}}]\n"
    )
    (folder / "wrong.yml").write_text("merge_method: tiess\n")
    return folder


@pytest.mark.parametrize(
    ("code", "command"),
    [
        (0, "inspect a"),
        (0, "ls methods"),
        (0, "ls architectures"),
        (2, "validate wrong.yml"),
        (2, "merge wrong.yml out"),
        (2, "calibrate a out --source a=a --data a=a.jsonl --alpha 2"),
        (0, "--help"),
        (0, "calibrate --help"),
        (0, "--version"),
    ],
)
def test_a_command_that_only_looks_imports_nothing_slow(code, command, folder):
    result = interpreter("-c", WATCHED, *command.split(), cwd=folder, env=environment())
    assert result.returncode == code, result.stderr
    assert "SLOW" not in result.stderr, (
        f"{result.stderr}\ntake torch and numpy from moemerge.runtime.lazy, and import what runs "
        "models inside functions"
    )


def test_importing_the_package_imports_almost_nothing():
    code = (
        "import sys; before = set(sys.modules); import moemerge; "
        "print(*({m.partition('.')[0] for m in set(sys.modules) - before} "
        "- set(sys.stdlib_module_names)))"
    )
    result = interpreter("-c", code)
    assert result.stdout.split() == ["moemerge"]


@pytest.mark.parametrize(
    ("requested", "verbs"),
    [
        ("swap-routers", {"compose", "convert", "swap-routers", "extract", "extract-lora"}),
        ("validate", {"merge", "validate", "run"}),
        ("inspct", None),
    ],
)
def test_only_the_module_of_the_requested_verb_is_imported(requested, verbs):
    code = (
        f"import sys; sys.argv = ['moemerge', {requested!r}]; from moemerge.cli.app import app; "
        "print(*(command.name or command.callback.__name__ for command in app.registered_commands))"
    )
    made = set(interpreter("-c", code).stdout.split())
    assert made == verbs if verbs else {"merge", "validate", "inspect", "study"} <= made
