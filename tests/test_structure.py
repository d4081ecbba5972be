"""Check the rules of docs/architecture.md that import-linter and ruff cannot check."""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "moemerge"
FILES = sorted(SOURCE.rglob("*.py"))

# Parts of torch that only some modules may use. Paths are relative to src/moemerge.
CONFINED = {
    "torch.cuda": ("runtime/", "kernels/"),
    "torch.distributed": ("runtime/ranks",),
}
# The distribution of an import, if its name differs.
INSTALLED_BY = {
    "cuda": "torch",
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic",
    "tokenizers": "transformers",
    "triton": "torch",
    "ruamel": "ruamel.yaml",
}


# Lines of each package. A package that outgrows its budget has to lose something first.
BUDGETS = {
    "checkpoint": 4_900,
    "cli": 3_300,
    "config": 4_700,
    "conversion": 2_350,
    "diagnosis": 1_650,
    "families": 2_550,
    "forward": 3_750,
    "kernels": 1_270,
    "lab": 9_150,
    "merging": 3_800,
    "methods": 2_950,
    "repairs": 7_950,
    "report": 1_450,
    "routing": 2_450,
    "runtime": 2_050,
    "statistics": 2_600,
    "text": 1_500,
}


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path):
    return tuple(ast.walk(parsed(path)))


def within(path):
    return path.relative_to(SOURCE).as_posix()


def imported_modules(nodes):
    """Yield the full names of imports: `from torch import cuda` is torch.cuda."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(nodes):
    """Yield the dotted names that a file uses: `torch.cuda.Stream`."""
    for node in nodes:
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(names)])


@pytest.mark.parametrize("part", CONFINED)
def test_parts_of_torch_stay_in_their_packages(part):
    strays = {
        within(path)
        for path in FILES
        if not within(path).startswith(CONFINED[part])
        for name in (*imported_modules(nodes(path)), *attributes(nodes(path)))
        if name == part or name.startswith(part + ".")
    }
    assert not strays, f"{part} belongs to {CONFINED[part]}; put a helper there"


def test_packages_stay_within_their_budgets():
    lines = {name: 0 for name in BUDGETS}
    for path in FILES:
        package = within(path).split("/")[0]
        if package in lines:
            lines[package] += len(path.read_text(encoding="utf-8").splitlines())
    assert {name: n for name, n in lines.items() if n > 1.02 * BUDGETS[name]} == {}


def test_every_import_is_declared():
    """The package or one of its extras installs every import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(r for name in extras for r in extras[name])]
    declared = {re.split(r"[\[<>=;!~ ]", entry)[0].lower().replace("-", "_") for entry in listed}
    strays = defaultdict(set)
    for path in FILES:
        for name in imported_modules(nodes(path)):
            package = name.split(".")[0]
            distribution = INSTALLED_BY.get(package, package).lower()
            if package in sys.stdlib_module_names or package == "moemerge":
                continue
            if distribution not in declared:
                strays[package].add(within(path))
    assert not strays, "declare them in pyproject.toml"


def test_extras_that_are_advised_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*FILES, *pages])
    advised = re.findall(r"(?:moemerge|\.)\[([a-z,]+)\]", text)
    assert {"report", "parquet", "vllm"} <= set(advised)
    assert {name for one in advised for name in one.split(",")} <= set(
        project["optional-dependencies"]
    )


def test_data_files_are_installed():
    """Without a pattern in pyproject.toml, a file would be missing outside a clone."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    patterns = setuptools["package-data"]["moemerge"]
    installed = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    installed |= {
        path for folder in list(installed) if folder.is_dir() for path in folder.rglob("*")
    }
    data = {
        path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert {within(p) for p in data - installed if p.suffix != ".py"} == set()
