"""Write diagnoses as pages: of a model, or of a merge before and after its repair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from moemerge.config.faults import parse_settings
from moemerge.config.job_settings import DiagnosisSettings
from moemerge.diagnosis.job import DiagnosisRequest, prepare
from moemerge.diagnosis.results import MODEL, Diagnosis
from moemerge.diagnosis.run import diagnose
from moemerge.diagnosis.verdict import NOTICEABLE
from moemerge.errors import MoeMergeError
from moemerge.repairs.inputs import JobText, RepairRequest
from moemerge.report.page import require_page, write_page
from moemerge.runtime.outputs import FileKind, check_output_file
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import SINGLE, Ranks


def page_path(report: str | Path, inputs: Iterable[object], *, overwrite: bool) -> Path:
    """Return the path of a page; refuse one that must not or cannot be written."""
    require_page()
    path = Path(report)
    check_output_file(path, FileKind.PAGE, overwrite=overwrite, inputs=inputs, what="the report")
    return path


@dataclass(frozen=True)
class BeforeAndAfter:
    """A merge and its repair, diagnosed together: `request` is of the merge, `out` the result."""

    request: DiagnosisRequest
    text: JobText  # settings of the repair and of the diagnosis
    out: Path
    path: Path | None  # path of the page, if requested
    shown: Callable[[str], str]  # names of sources in place of temporary folders

    @classmethod
    def of(
        cls,
        repair: RepairRequest[Any],
        report: str | Path | None,
        *,
        label: str | None = None,
        command: str | None = None,
    ) -> BeforeAndAfter:
        """Check as much as possible before OUT exists.

        Text and device are those of the repair, and all layers are measured.
        """
        shared = DiagnosisSettings.model_fields.keys() & type(repair.settings).model_fields.keys()
        values = {name: getattr(repair.settings, name) for name in shared - {"layers"}}
        request = DiagnosisRequest(
            model=repair.merged,
            sources=repair.sources,
            data=repair.data,
            against=(),
            settings=parse_settings(DiagnosisSettings, values, "diagnosis settings"),
            experts=repair.experts,
            label=label,
            check=repair.check,
            command=command,
        )
        texts = chain(*repair.data.values(), *repair.check.values())
        inputs = (repair.merged, *repair.sources.values(), *texts)
        path = None if report is None else page_path(report, inputs, overwrite=repair.overwrite)
        return cls(request, prepare(request, SINGLE).text, repair.out, path, repair.shown)

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out rows."""
        return any(domain.holdout for domain in self.text.domains)

    def measure(self, progress: Progress, ranks: Ranks) -> Diagnosis:
        """Diagnose both and write the page. A failure here does not affect the result."""
        try:
            job = prepare(replace(self.request, against=(self.out,)), ranks, self.text)
            diagnosis = diagnose(job, progress, seen=self.text.notices)  # reported by the repair
            named = {n: replace(m, label=self.shown(m.label)) for n, m in diagnosis.sources.items()}
            diagnosis = replace(diagnosis, sources=named)
            if self.path is not None:
                write_page(diagnosis.to_json(), self.path)
        except MoeMergeError as error:
            missing = (
                "its routing is not measured" if self.path is None else f"not the page {self.path}"
            )
            raise type(error)(
                f"{self.out} is written and whole, but {missing}: {error.message}", hint=error.hint
            ) from error
        return diagnosis

    def figures(self, diagnosis: Diagnosis) -> dict[str, Any]:
        """Return the mismatch and the loss of each domain with held-out rows, before and after.

        The figures of other domains are of rows that were fitted, so only their names are returned.
        """
        names = [domain.name for domain in self.text.domains if domain.holdout]
        ends = {"before": MODEL, "after": str(self.out)}
        totals = {
            end: {name: diagnosis.total(name, model) for name in names}
            for end, model in ends.items()
        }
        return {
            "tokens": {name: total.tokens for name, total in totals["after"].items()},
            **{
                f"{figure}_{end}": {n: t.figures.get(figure) for n, t in totals[end].items()}
                for figure in ("mismatch", "loss")
                for end in ends
            },
            "not_held_out": [name for name in diagnosis.domains if name not in names],
            "check": {name: self._check(diagnosis, name) for name in self.request.check},
        }

    def _check(self, diagnosis: Diagnosis, name: str) -> dict[str, Any] | None:
        """Return the loss on a check text before and after; None if it has no predicted token."""
        before = diagnosis.check_of(name)
        after = diagnosis.check_of(name, str(self.out))
        source = diagnosis.check_of(name, name)
        if before is None or after is None:
            return None
        return {
            "rows": before.rows,
            "documents": before.documents,
            "tokens": before.tokens,
            "loss_before": before.loss,
            "loss_after": after.loss,
            "change": after.change,
            "change_error": after.change_error,
            "loss_source": None if source is None else source.loss,
        }


def loss_notices(figures: Mapping[str, Any]) -> list[str]:
    """Return notices about domains whose loss a repair raised, from `BeforeAndAfter.figures`.

    The routing may still be closer to the source's: the experts of a merge close to its base may
    not suit the sources' routing.
    """
    before, after = figures["loss_before"], figures["loss_after"]
    losses = [("the rows held out", name, before[name], after[name]) for name in before]
    for name, check in figures.get("check", {}).items():
        if check is not None:
            losses.append(("the check text", name, check["loss_before"], check["loss_after"]))
    return [
        f"{name}: on {where} the next-token loss rose from {old:.3f} to {new:.3f} nats: the "
        "unrepaired merge predicts this text better, so compare both on your tasks"
        for where, name, old, new in losses
        if None not in (old, new) and new > old + NOTICEABLE
    ]
