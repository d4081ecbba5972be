"""Supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from moemerge.api.hub import uploaded
from moemerge.api.jobs import Model, files_of, settings_for
from moemerge.config.settings import with_keywords
from moemerge.config.translate import parse_settings
from moemerge.config.tuning import (
    TuningKeywords,
    TuningOutputKeywords,
    TuningOutputSettings,
    TuningSettings,
)
from moemerge.runtime import ranks
from moemerge.runtime.progress import Progress, Silent

if TYPE_CHECKING:
    from moemerge.api.jobs import Files
    from moemerge.tuning import TuningReport


class TuneKeywords(TuningKeywords, TuningOutputKeywords, total=False):
    """Keywords of `tune`."""


@with_keywords(TuneKeywords, TuningSettings, TuningOutputSettings)
def tune(
    model: Model,
    out: str | Path,
    *,
    data: Files,
    settings: TuningSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[TuneKeywords],
) -> TuningReport:
    """Let `model` learn the answers of the rows in `data`, and write the result to `out` in the
    layout that the model has.

    Settings are given as a whole, or one by one: `tune(..., preset="paper")`,
    `tune(..., lora=16, epochs=1)`. `resume` goes on from the last state that an interrupted run
    saved. Under torchrun or `accelerate launch` every process must call it; rank 0 writes.
    """
    from moemerge.tuning import TuningRequest, run_tuning

    names = TuningOutputSettings.model_fields
    given = {name: value for name, value in keywords.items() if name in names}
    values = {name: value for name, value in keywords.items() if name not in names}
    output = parse_settings(TuningOutputSettings, given, "settings of tune")
    request = TuningRequest(
        model=model,
        out=Path(out),
        data=files_of(data),
        settings=settings_for(TuningSettings, settings, values, "tune"),
        overwrite=output.overwrite,
        resume=output.resume,
    )
    progress = Silent() if progress is None else progress
    with uploaded(request.out, output.push_to_hub if ranks.leads() else None, progress):
        return run_tuning(request, progress)
