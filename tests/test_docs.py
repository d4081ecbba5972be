"""The documents: every public name is in the reference, and every link leads somewhere."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moemerge
from moemerge.api import list_architectures, list_methods, list_wrappers
from moemerge.routing.figures import FIGURES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "moemerge"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PUBLIC = [name for name in moemerge.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name):
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert f"::: moemerge.{name}\n" in reference


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_of_its_own(name):
    thing = getattr(moemerge, name)
    said = [thing]
    if inspect.isclass(thing):
        said += [
            member
            for attribute, member in vars(thing).items()
            if not attribute.startswith("_")
            and (inspect.isroutine(member) or isinstance(member, property))
        ]
    silent = [repr(part) for part in said if not (inspect.getdoc(part) or "").strip()]
    assert not silent
    # What dataclasses write for themselves says nothing.
    assert not (inspect.isclass(thing) and (thing.__doc__ or "").startswith(f"{thing.__name__}("))


def test_methods_that_are_explained_exist():
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| (?:method|wrapper) \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    rows = [line.split("|")[1] for table in tables for line in table.splitlines()]
    explained = set(re.findall(r"`(\w+)`", " ".join(rows)))
    methods = {row["method"] for row in list_methods()}
    assert explained == methods | {row["wrapper"] for row in list_wrappers()}


def test_promises_name_tests_that_exist():
    page = (ROOT / "docs" / "data" / "reliability-details.md").read_text(encoding="utf-8")
    _, _, section = page.partition("promise | test |")
    rows = [line for line in section.partition("\n\n")[0].splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), row


def test_figures_are_explained_as_they_are_declared():
    """The site makes the table anew, so a figure may be missing here, but none may be wrong."""
    page = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    table = page.partition("<!-- figures -->")[2].partition("<!-- /figures -->")[0]
    explained = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))
    assert len(explained) > 20
    assert explained == {name: FIGURES[name].meaning for name in explained}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_code_that_pages_speak_of_is_there(page):
    """Names such as `routing.gates`, and paths such as `architectures/rules.py`."""
    text = page.read_text(encoding="utf-8")
    rooms = "|".join(p.name for p in SOURCE.iterdir() if p.is_dir() and p.name.isidentifier())
    names = re.findall(rf"`(?:moemerge\.)?((?:{rooms})(?:\.\w+)+)`", text)
    paths = re.findall(rf"`((?:{rooms})/[\w/]+(?:\.\w+)?)`", text)
    assert [name for name in names if not is_there(name)] == []
    assert [path for path in paths if not (SOURCE / path).exists()] == []


def is_there(name):
    thing = moemerge
    module = "moemerge"
    for part in name.split("."):
        module = f"{module}.{part}"
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
        if not hasattr(thing, part):
            return part in getattr(thing, "__annotations__", {})
        thing = getattr(thing, part)
    return True


def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path):
    """Strictly: every link, anchor, page and docstring is there. It opens from disk, offline."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {"index.html", "reference.html", "contributing.html"} <= pages.keys()
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*\"")
    assert {name: found for name, text in pages.items() if (found := fetched.findall(text))} == {}
    styles = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.css")]
    assert not any("@import" in style or "url(http" in style for style in styles)


def test_families_that_cannot_be_calibrated_are_named():
    page = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
    refused = [row["family"] for row in list_architectures() if row["calibration"] != "yes"]
    assert [family for family in refused if f"`{family}`" not in page] == []


def script(name):
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_generated_tables_and_figure_are_up_to_date():
    changed = script("generate").outdated()
    assert [path.relative_to(ROOT).as_posix() for path in changed] == []


def test_the_notebook_runs(tmp_path):
    path = ROOT / "examples" / "quickstart.ipynb"
    assert path.stat().st_size < 200_000
    text = path.read_text(encoding="utf-8")
    for rows, fewer in {"0, 64": "0, 12", "0, 32": "0, 6", "900, 1000": "900, 906"}.items():
        assert text.count(rows) == 1
        text = text.replace(rows, fewer)
    short = tmp_path / path.name
    short.write_text(text, encoding="utf-8")
    notebook = script("notebook").run_cells(short, tmp_path)
    last = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"][-1]
    printed = "".join(last["outputs"][0]["text"])
    assert all(name in printed for name in ("model", "calibrated", "refitted"))
    assert (tmp_path / "refitted" / "model.safetensors").exists()


def test_no_file_names_a_package_index():
    """Nothing is published there, and the name could belong to somebody else."""
    hosts = re.compile(r"\b(test\.)?pypi\.org|files\.pythonhosted\.org")
    kept = (".py", ".md", ".yml", ".toml", ".html", ".js", ".ipynb")
    files = [p for top in ("src", "docs", "examples") for p in (ROOT / top).rglob("*")]
    found = [p for p in files if p.suffix in kept and hosts.search(p.read_text(encoding="utf-8"))]
    assert not found
