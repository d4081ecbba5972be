"""Calibration text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from moemerge.api.jobs import Model, files_of, settings_for
from moemerge.config.data import DataKeywords, DataSettings
from moemerge.config.settings import with_keywords
from moemerge.runtime.progress import Progress, Silent

if TYPE_CHECKING:
    from moemerge.api.jobs import Files
    from moemerge.data import DataReport


@with_keywords(DataKeywords, DataSettings)
def make_data(
    model: Model,
    out: str | Path,
    *,
    prompts: Files = (),
    text: Files = (),
    settings: DataSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[DataKeywords],
) -> DataReport:
    """Write calibration text to the file `out`: answers of `model` to `prompts` that were found
    right, or what else `keep` says; or rows of plain `text`.

    Settings are given as a whole, or one by one: `make_data(..., verify="math", samples=4)`.
    A killed run goes on when it is run again.
    """
    from moemerge.data import DataRequest, run_data

    request = DataRequest(
        model=model,
        out=Path(out),
        prompts=files_of(prompts),
        text=files_of(text),
        settings=settings_for(DataSettings, settings, keywords, "make_data"),
        overwrite=overwrite,
    )
    return run_data(request, Silent() if progress is None else progress)
