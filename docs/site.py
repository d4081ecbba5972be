"""Hooks of the site: pages from the repository's root, links that lead out of docs/, figures.

README.md, CONTRIBUTING.md and CHANGELOG.md are read on a forge as well as on the site. They are
written for the forge; here their links are turned, and the examples they show are copied along.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Page of the site -> the file at the root that it is made from.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
# Files and folders at the root that are copied, since pages link to them.
COPIED = ("examples", "LICENSE")

# A table that the site makes anew; what stands in the file is for readers on the forge.
_FIGURES = re.compile(r"<!-- figures -->.*<!-- /figures -->", re.DOTALL)
_LINK = re.compile(r"(\]\()([^)#\s]+)")
_BACK = {source: page for page, source in PAGES.items()}


def on_files(files: Files, config: Any) -> Files:
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_turn(text, from_root=True)))
    for name in COPIED:
        place = ROOT / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file():
                target = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, target, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "diagnosis.md":
        markdown = _FIGURES.sub(lambda _: figures_table(), markdown)
    return markdown if page.file.src_uri in PAGES else _turn(markdown, from_root=False)


def figures_table() -> str:
    """The figures of a diagnosis, made from their declarations."""
    from moemerge.routing.figures import FIGURES

    rows = [f"| `{name}` | {figure.meaning} |" for name, figure in FIGURES.items()]
    return "\n".join(["| figure | what it is |", "|---|---|", *rows])


def _turn(text: str, *, from_root: bool) -> str:
    """Links as the site needs them: everything lies in one folder there."""

    def target(match: re.Match[str]) -> str:
        link = match[2]
        if "://" in link:
            return match[0]
        inside = link.removeprefix("docs/") if from_root else link.removeprefix("../")
        return match[1] + _BACK.get(inside, inside)

    return _LINK.sub(target, text)
