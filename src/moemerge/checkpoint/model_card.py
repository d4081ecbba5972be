"""The report, the resolved config and the model card in an output folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from moemerge.config.models import CONFIG_NAME as CONFIG_NAME
from moemerge.runtime.checksums import REPORT_NAME as REPORT_NAME
from moemerge.runtime.checksums import report_bytes as report_bytes
from moemerge.version import __version__

CARD_NAME = "README.md"


def report_document(**parts: dict[str, Any] | None) -> dict[str, Any]:
    """Return a document with one part per job, and a header with version and time."""
    return {
        "moemerge": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: part for name, part in parts.items() if part is not None},
    }


def report_file(**parts: dict[str, Any] | None) -> bytes:
    """Return the content of such a document's file."""
    return report_bytes(report_document(**parts))


def own_files(config: str, card: str, **parts: dict[str, Any] | None) -> dict[str, bytes]:
    """Return the files that moemerge adds to an output: resolved config, card and report."""
    report = report_file(**parts)
    return {CONFIG_NAME: config.encode(), CARD_NAME: card.encode(), REPORT_NAME: report}


CARD = """---
{front_matter}---
# {title}

{summary}

{sections}
## Configuration

The resolved configuration, which {again}:

```yaml
{config}```

Made with moemerge {version}. The report on every input tensor is in `moemerge_report.json`.
"""


_MARKDOWN = re.compile(r"[\\`*\[\]<>#|&\x00-\x1f\x7f]")


def in_markdown(name: str) -> str:
    """Escape a name from a user or a file for a card: no markup, no HTML, one line."""
    return _MARKDOWN.sub(lambda match: f"&#{ord(match[0])};" if match[0] >= " " else " ", name)


def in_code(name: str) -> str:
    """Escape a name between backticks."""
    return re.sub(r"[`\x00-\x1f\x7f]", " ", name)


def model_card(
    *,
    title: str,
    summary: str,
    hub_models: Sequence[str],
    sections: Sequence[tuple[str, str]],
    config: str,
    tags: Sequence[str] = ("merge", "moemerge"),
    flags: Sequence[str] | None = (),
) -> str:
    """Return Markdown with the hub's front matter.

    `hub_models` are the inputs on the hub. `flags` are settings that the config does not contain;
    None if even those do not suffice, because rows were in memory.
    """
    needed = f" (with `{' '.join(flags)}`)" if flags else ""
    front = ["library_name: transformers", "tags:", *(f"- {tag}" for tag in tags)]
    if hub_models:
        front += ["base_model:", *(f"- {json.dumps(m)}" for m in hub_models)]
    body = "".join(f"## {heading}\n\n{text}\n\n" for heading, text in sections)
    return CARD.format(
        front_matter="".join(f"{line}\n" for line in front),
        title=in_markdown(title),
        summary=summary,
        sections=body.rstrip("\n") + "\n" if body else "",
        config=config if config.endswith("\n") else config + "\n",
        version=__version__,
        again=f"makes this model again{needed}"
        if flags is not None
        else "lacks rows that were in memory",
    )
