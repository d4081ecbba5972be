"""Diagnoses as pages: of a model, and of a merge before and after its calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moemerge.config.models import ModelRef
from moemerge.config.settings import DiagnosisSettings
from moemerge.config.translate import parse_settings
from moemerge.diagnosis.job import DiagnosisRequest, prepare
from moemerge.diagnosis.run import diagnose
from moemerge.errors import MoeMergeError, UsageError
from moemerge.lockstep.inputs import JobText
from moemerge.report.page import require_page, write_page
from moemerge.runtime.progress import Progress
from moemerge.text.rows import TextSource


def page_path(report: str | Path) -> Path:
    """Where to write a page; what would hinder it is told before any work."""
    require_page()
    path = Path(report)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(
            f"the report {path} cannot be written: "
            + ("it is a folder" if path.is_dir() else f"there is no folder {path.parent}"),
            hint="name an HTML file in a folder that exists",
        )
    return path


@dataclass(frozen=True)
class BeforeAndAfter:
    """The page of a calibration: `request` diagnoses the merge, `out` is the calibrated model."""

    request: DiagnosisRequest
    text: JobText  # of the calibration and of the page
    out: Path
    path: Path

    @classmethod
    def of(
        cls,
        report: str | Path,
        models: tuple[str | Path | ModelRef, Path],
        sources: Mapping[str, str | Path | ModelRef],
        data: Mapping[str, Sequence[TextSource]],
        settings: Mapping[str, Any],
        *,
        label: str | None = None,
        command: str | None = None,
    ) -> BeforeAndAfter:
        """Checked as far as it can be before OUT exists.

        `settings` are the calibration's: the text and the device are taken from them, and all
        layers are measured.
        """
        shared = DiagnosisSettings.model_fields.keys() - {"layers"}
        values = {name: value for name, value in settings.items() if name in shared}
        request = DiagnosisRequest(
            model=models[0],
            sources=sources,
            data=data,
            against=(),
            settings=parse_settings(DiagnosisSettings, values, "diagnosis settings"),
            label=label,
            command=command,
        )
        path = page_path(report)
        return cls(request, prepare(request).text, models[1], path)

    def write(self, progress: Progress) -> None:
        """Diagnose both and write the page; what hinders it leaves the calibrated model be."""
        try:
            job = prepare(replace(self.request, against=(self.out,)), self.text)
            write_page(diagnose(job, progress).to_json(), self.path)
        except MoeMergeError as error:
            raise type(error)(
                f"{self.out} is written and whole, but not the page {self.path}: {error.message}",
                hint=error.hint,
            ) from error
