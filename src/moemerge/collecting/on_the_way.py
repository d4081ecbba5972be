"""Statistics that a merge needs and that were not saved before: made of the models' own text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moemerge.checkpoint.passing import passing_folder
from moemerge.collecting.prepare import CollectRequest
from moemerge.collecting.run import run_collect
from moemerge.config.models import ModelRef
from moemerge.config.requests import StatisticsRequest
from moemerge.runtime.progress import Progress
from moemerge.text.rows import check_files


@contextlib.contextmanager
def computed_statistics(
    wanted: StatisticsRequest,
    models: Mapping[str, ModelRef],
    out: Path,
    device: str,
    progress: Progress,
) -> Iterator[Mapping[str, Sequence[Path]]]:
    """Files of the models that have text instead, beside `out` while the context lasts.

    They are the very files that `moemerge stats` writes with the same settings.
    """
    check_files(wanted.data)
    settings = wanted.settings
    if device != "auto":
        settings = settings.model_copy(update={"device": device})
    with passing_folder(out) as folder:
        made: dict[str, list[Path]] = {}
        for number, (name, files) in enumerate(wanted.data.items()):
            for kind in wanted.needs[name]:
                file = folder / f"{number}.{kind}.stats"
                run_collect(
                    CollectRequest(
                        model=models[name],
                        out=file,
                        data=files,
                        settings=settings.model_copy(update={"kind": kind}),
                    ),
                    progress,
                )
                made.setdefault(name, []).append(file)
        yield made
