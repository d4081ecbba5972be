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

MAX_LINES = 450
MAX_PARAMETERS = 8

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
    "yaml": "pyyaml",
}


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path):
    return tuple(ast.walk(parsed(path)))


def within(path):
    return path.relative_to(SOURCE).as_posix()


def functions(nodes):
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_triton_kernel(function):
    return any("triton." in ast.unparse(decorator) for decorator in function.decorator_list)


def parameters(function):
    signature = function.args
    named = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
    starred = [a for a in (signature.vararg, signature.kwarg) if a is not None]
    return [a.arg for a in [*named, *starred] if a.arg not in {"self", "cls"}]


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


def test_paths_are_tested_without_exceptions():
    """`Path.exists` raises if a name is too long or a folder is closed; `os.path.exists` never."""
    strays = {
        f"{within(path)}:{node.lineno}"
        for path in FILES
        if within(path) != "report/frame/__init__.py"  # a resource of the package
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
        if node.func.attr in ("exists", "is_dir", "is_file", "is_symlink")
    }
    assert not strays, "use os.path.exists, isdir, isfile or islink"


def test_files_stay_short():
    lengths = {within(p): len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_parameter_lists_stay_short():
    long = {
        f"{within(path)}:{function.name}"
        for path in FILES
        # A command has a parameter for each flag, a public function or decorator for each keyword.
        if not within(path).startswith(("api/", "cli/", "methods/method.py"))
        for function in functions(nodes(path))
        if len(parameters(function)) > MAX_PARAMETERS and not is_triton_kernel(function)
    }
    assert not long, f"more than {MAX_PARAMETERS} parameters"


def test_a_class_name_has_one_meaning():
    places = defaultdict(list)
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(within(path))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert twice == {}


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


def sentences(nodes):
    """Yield all strings but docstrings; adjacent parts of one string are joined."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = set()
    for node in nodes:
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr):
            skipped.add(id(node.body[0].value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, ast.walk(node)))
            parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and id(node) not in skipped:
            yield str(node.value)


# Modules whose messages name flags: complete commands, and advice to readers of a page.
WITH_FLAGS = (
    "api/merging.py",
    "cli/",
    "diagnosis/advice.py",
    "diagnosis/run.py",
    "diagnosis/verdict.py",
    "report/page/",
    "lab/verification/sandbox/",
)


def test_only_the_command_line_names_flags():
    """Errors also reach Python callers: they name settings, which the cli prints as flags."""
    flags = {
        within(path): text
        for path in FILES
        if not within(path).startswith(WITH_FLAGS)
        for text in sentences(nodes(path))
        if re.search(r"(?<![\w-])--[a-z]", text) and "moemerge " not in text
    }
    assert flags == {}


def test_settings_that_messages_advise_exist():
    """Some job accepts the setting `name` of every `name=value` in a message."""
    import inspect

    from moemerge import api
    from moemerge.lab.experiments.study import study

    verbs = (name for names in api._PARTS.values() for name in names.split())
    jobs = [study, *(getattr(api, name) for name in verbs)]
    known = {name for job in jobs for name in inspect.signature(job).parameters}
    advised = {
        name
        for path in FILES
        if not within(path).startswith("cli/")
        for text in sentences(nodes(path))
        for name in re.findall(r"`([a-z_]+)=[^`]+`", text)
    }
    assert {"offload", "overwrite", "sources"} <= advised
    assert advised - known == set()


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
