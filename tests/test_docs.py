"""The documents: every public name is in the reference, and every link leads somewhere."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import moemerge

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PUBLIC = [name for name in moemerge.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert f"::: moemerge.{name}\n" in reference


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_site_is_built_without_the_network() -> None:
    """Pages must open from disk: no fonts, scripts or styles of other hosts."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "://" not in settings
