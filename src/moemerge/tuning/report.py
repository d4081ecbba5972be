"""What a tuning did, and the files that say so in OUT."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint import hub_ids
from moemerge.config.dump import dump_document
from moemerge.lockstep.output_files import TUNING, earlier_report
from moemerge.report.files import (
    CARD_NAME,
    CONFIG_NAME,
    REPORT_NAME,
    in_code,
    model_card,
    report_bytes,
    report_document,
)
from moemerge.runtime.progress import counted
from moemerge.version import __version__

MOST_POINTS: Final = 1000  # of the curve in a report


@dataclass(frozen=True)
class CurvePoint:
    """One step of a training."""

    step: int
    loss: float
    learning_rate: float
    gradient: float  # its norm, before it was bounded


@dataclass(frozen=True)
class TuningReport:
    """What was trained, on what, and how the loss fell."""

    model: str
    output: str
    data: tuple[str, ...]
    settings: Mapping[str, Any]
    kind: str  # "model" or "adapter"
    device: str
    dtype: str
    processes: int
    micro_batch: int
    parameters: int  # that were trained
    rows: int
    read: int  # rows of all files
    tokens: int  # of the rows, once
    learnt: int  # of these tokens
    steps: int
    epochs: float
    resumed: int  # steps of an interrupted run
    curve: tuple[CurvePoint, ...]
    notices: tuple[str, ...]
    seconds: float
    training_seconds: float

    @property
    def first_loss(self) -> float:
        return self.curve[0].loss

    @property
    def last_loss(self) -> float:
        """The mean of the last tenth of the steps: one batch says little."""
        last = self.curve[-max(1, len(self.curve) // 10) :]
        return sum(point.loss for point in last) / len(last)

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "curve"}
        return {
            **values,
            "data": list(self.data),
            "settings": dict(self.settings),
            "notices": list(self.notices),
            "seconds": round(self.seconds, 3),
            "training_seconds": round(self.training_seconds, 3),
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "curve": [asdict(point) for point in _thinned(self.curve)],
            "versions": versions(),
        }


def _thinned(curve: Sequence[CurvePoint]) -> Sequence[CurvePoint]:
    step = -(-len(curve) // MOST_POINTS)
    return curve[::step]


def versions() -> dict[str, str]:
    """Of what a training depends on."""
    names = ("torch", "transformers", "trl", "peft", "accelerate")
    return {
        "moemerge": __version__,
        **{name: metadata.version(name) for name in names},
        "python": platform.python_version(),
    }


def output_files(report: TuningReport, folder: Path) -> dict[str, bytes]:
    """Config, report and card of OUT; `folder` is the model that was tuned."""
    config = dump_document({"tune": _command(report)})
    earlier = earlier_report(folder)
    parts = {n: part for n, part in earlier.items() if isinstance(part, dict)}
    document = report_document(__version__, **{**parts, TUNING: report.to_json()})
    card = model_card(
        title=Path(report.output).name,
        summary=_summary(report),
        hub_models=hub_ids(report.model),
        sections=[("Training", _words(report))],
        config=config,
        version=__version__,
        tags=("moe", "sft", "moemerge"),
    )
    return {
        CONFIG_NAME: config.encode(),
        REPORT_NAME: report_bytes(document),
        CARD_NAME: card.encode(),
    }


def _command(report: TuningReport) -> dict[str, Any]:
    settings = {n: v for n, v in report.settings.items() if v is not None and n != "preset"}
    return {"model": report.model, "data": list(report.data), **settings}


def _summary(report: TuningReport) -> str:
    what = "An adapter for" if report.kind == "adapter" else "A fine-tune of"
    return f"{what} `{in_code(report.model)}`."


def _words(report: TuningReport) -> str:
    settings = report.settings
    how = "all weights" if settings["only"] is None else f"the {settings['only']} alone"
    if settings["lora"] is not None:
        how = f"a LoRA of rank {settings['lora']} on {how}"
    return (
        f"Supervised fine-tuning of {how} ({report.parameters:,} parameters) on the answers of "
        f"{counted(report.rows, 'row')} ({report.learnt:,} of {counted(report.tokens, 'token')} "
        f"learnt), {counted(report.steps, 'step')} of {counted(settings['batch'], 'row')} "
        f"({report.epochs:.3g} epochs), "
        f"learning rate {settings['learning_rate']:g} ({settings['schedule']}, warm-up "
        f"{settings['warmup']:g}), load-balancing loss {settings['aux_loss']:g}. The loss went "
        f"from {report.first_loss:.4g} to {report.last_loss:.4g} (mean of the last tenth)."
    )
