"""Calibration text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from moemerge.api.jobs import Model, files_of, settings_for
from moemerge.checkpoint.locate import is_local
from moemerge.config.data import DataKeywords, DataSettings
from moemerge.config.settings import with_keywords
from moemerge.runtime.progress import Progress, Silent
from moemerge.runtime.words import counted
from moemerge.text.rows import check_files

if TYPE_CHECKING:
    from moemerge.api.jobs import Files
    from moemerge.config.load import LoadedConfig
    from moemerge.config.requests import TextRequest
    from moemerge.data import DataReport, DataRequest


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
    """Write calibration text to the file `out`: answers of `model` to `prompts` that were judged
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


def check_recipes(loaded: LoadedConfig) -> None:
    """Refuse recipes of a config that contradict themselves or lack files, before any work."""
    for file, wanted in loaded.texts.items():
        if Path(file).exists():
            continue
        from moemerge.data.job import check_request

        request = _request(wanted)
        check_request(request)
        inputs = (*request.prompts, *request.text, *request.settings.against)
        check_files({file: [source for source in inputs if is_local(str(source))]})


def make_texts(loaded: LoadedConfig, progress: Progress) -> None:
    """Make the text that a config has recipes for. A file that is there is used as it is."""
    for file, wanted in loaded.texts.items():
        if Path(file).exists():
            progress.note(f"{file} is there and used as it is; without it, it is made anew")
            continue
        from moemerge.data import run_data

        report = run_data(_request(wanted), progress)
        progress.note(f"{file}: {counted(report.kept, 'row')} of text, made by {wanted.model}")


def _request(wanted: TextRequest) -> DataRequest:
    from moemerge.data import DataRequest

    recipe = wanted.recipe
    return DataRequest(
        model=wanted.model,
        out=Path(recipe.file),
        prompts=recipe.prompts,
        text=recipe.text,
        settings=recipe.settings,
    )
