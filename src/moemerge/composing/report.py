"""The report and the model card of a composition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moemerge.checkpoint import hub_ids
from moemerge.composing.fit import own_share
from moemerge.composing.settings import ComposeSettings
from moemerge.config.settings import as_flags
from moemerge.report.files import in_code, model_card
from moemerge.runtime.progress import counted
from moemerge.version import __version__


@dataclass(frozen=True)
class ComposeReport:
    """The part of a composition in `moemerge_report.json`."""

    base: str
    experts: tuple[str, ...]
    shared_expert: str | None
    architecture: str
    gate_mode: str
    experts_per_token: int
    added_to: int  # experts that the base had already
    attention: str | None  # the method by which attention was merged
    settings: Mapping[str, Any]
    output: str
    output_tensors: int
    output_bytes: int
    output_parameters: int
    dtypes: tuple[str, ...]
    notices: tuple[str, ...]
    routers: tuple[Mapping[str, Any], ...] = ()  # figures of fitted routers
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def own_share(self) -> float | None:
        """The share of tokens whose first expert is their domain's: held out, if rows were."""
        return own_share(self.routers) if self.routers else None


def compose_card(report: ComposeReport, config: str, settings: ComposeSettings) -> str:
    """Return the README of a composed model."""
    given = settings.model_dump(exclude_defaults=True, exclude={"overwrite", "push_to_hub"})
    numbered = enumerate(report.experts, report.added_to)
    sources = [f"- expert {n}: `{in_code(name)}`" for n, name in numbered]
    shared = [] if report.shared_expert is None else [report.shared_expert]
    rest = f", merged with `{in_code(report.attention)}`" if report.attention else ""
    lines = [f"- base: `{in_code(report.base)}`{rest}", *sources]
    lines += [f"- shared expert: `{in_code(name)}`" for name in shared]
    inputs = (report.base, *report.experts, *shared)
    count = counted(report.added_to + len(report.experts), "expert")
    made = f"{len(report.experts)} of them added" if report.added_to else "composed of dense models"
    return model_card(
        title=Path(report.output).name,
        summary=f"A {report.architecture} model of {count}, {report.experts_per_token} per token, "
        f"{made}. Routers: `{report.gate_mode}`.",
        hub_models=list(dict.fromkeys(part for name in inputs for part in hub_ids(name))),
        sections=[("Models", "\n".join(lines))],
        config=config,
        version=__version__,
        tags=("moe", "moemerge"),
        flags=as_flags(given),
    )
