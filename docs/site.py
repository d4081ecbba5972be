"""Hooks for mkdocs: add the pages at the repository's root, rewrite links, fill in the figures.

README.md, CONTRIBUTING.md, CHANGELOG.md and SECURITY.md are written for a code host. The site
needs other links, and copies of the examples that they link to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Page of the site -> file at the root.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
# Files and folders at the root that pages link to; they are copied.
COPIED = ("examples", "LICENSE")

# The site generates this table again; the one in the file is for readers on a code host.
_FIGURES = re.compile(r"<!-- figures -->.*<!-- /figures -->", re.DOTALL)
_LINK = re.compile(r"(\]\()([^)#\s]+)")
_BACK = {source: page for page, source in PAGES.items()}


def on_files(files: Files, config: Any) -> Files:
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_rewrite_links(text, from_root=True)))
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
    # Pages in folders, such as data/, link relative to their own place.
    if page.file.src_uri in PAGES or "/" in page.file.src_uri:
        return markdown
    return _rewrite_links(markdown, from_root=False)


def figures_table() -> str:
    """Return the table of a diagnosis's figures, from their declarations."""
    from moemerge.routing.figures import FIGURES

    rows = [f"| `{name}` | {figure.meaning} |" for name, figure in FIGURES.items()]
    return "\n".join(["| figure | what it is |", "|---|---|", *rows])


def _rewrite_links(text: str, *, from_root: bool) -> str:
    """Rewrite links for the site, where all pages are in one folder."""

    def target(match: re.Match[str]) -> str:
        link = match[2]
        if "://" in link:
            return match[0]
        inside = link.removeprefix("docs/") if from_root else link.removeprefix("../")
        return match[1] + _BACK.get(inside, inside)

    return _LINK.sub(target, text)
