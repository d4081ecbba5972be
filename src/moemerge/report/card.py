"""The model card (README.md) of an output folder."""

from __future__ import annotations

from collections.abc import Sequence

CARD = """---
{front_matter}---
# {title}

{summary}

{sections}
## Configuration

The resolved configuration, which makes this model again:

```yaml
{config}```

Made with [moemerge](https://pypi.org/project/moemerge/) {version}. What became of every input
tensor is in `moemerge_report.json`.
"""


def model_card(
    *,
    title: str,
    summary: str,
    hub_models: Sequence[str],
    sections: Sequence[tuple[str, str]],
    config: str,
    version: str,
) -> str:
    """Markdown with the hub's front matter; `hub_models` are the inputs that live on the hub."""
    front = ["library_name: transformers", "tags:", "- merge", "- moemerge"]
    if hub_models:
        front += ["base_model:", *(f"- {m}" for m in hub_models)]
    body = "".join(f"## {heading}\n\n{text}\n\n" for heading, text in sections)
    return CARD.format(
        front_matter="".join(f"{line}\n" for line in front),
        title=title,
        summary=summary,
        sections=body.rstrip("\n") + "\n" if body else "",
        config=config if config.endswith("\n") else config + "\n",
        version=version,
    )
