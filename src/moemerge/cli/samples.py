"""`--sample`, or `-v`: a short completion by each model after a command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from moemerge.cli.console import STDOUT, out
from moemerge.cli.flags import ADVANCED, Reporting
from moemerge.errors import UsageError
from moemerge.runtime import ranks

BUILT_IN = ["The capital of France is", "2 + 2 ="]  # with -v and without --sample


def _not_empty(prompts: list[str] | None) -> list[str] | None:
    """Refuse an empty prompt before the work starts."""
    if prompts and not all(prompt.strip() for prompt in prompts):
        raise UsageError("--sample: the prompt is empty", hint="write some text after it")
    return prompts


Samples = Annotated[
    list[str] | None,
    typer.Option(
        "--sample",
        metavar="PROMPT",
        callback=_not_empty,
        help="Finally print a short completion by each model (-v: of two built-in prompts). "
        "Repeat it.",
        rich_help_panel=ADVANCED,
    ),
]


def show_samples(
    prompts: list[str] | None,
    result: Path,
    others: Mapping[str, str],
    device: str,
    reporting: Reporting,
) -> None:
    """Print a short greedy completion of each prompt by the result and each other model."""
    prompts = prompts or (BUILT_IN if reporting.verbose else None)
    if not prompts or reporting.quiet or reporting.json == STDOUT or not ranks.leads():
        return
    from moemerge import api

    with reporting.progress() as bar:
        models = {"OUT": str(result), **others}
        made = api.sample(models, prompts, device=device, progress=bar)
    for name, texts in made.items():
        for prompt, text in zip(prompts, texts, strict=False):
            out.print(f"{name}: {prompt!r} -> {text!r}", markup=False, soft_wrap=True)
