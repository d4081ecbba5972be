"""What jobs share that repair a merged model: request, key, output, report, and OUT's own words."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from moemerge.architectures.opened import OpenModel, open_model
from moemerge.checkpoint import hub_ids
from moemerge.checkpoint.patch import Quantised
from moemerge.config.documents import MergeDocument, parse_document
from moemerge.config.dump import dump_config
from moemerge.config.models import ModelRef
from moemerge.config.schema import RunConfig
from moemerge.config.settings import as_flags
from moemerge.config.translate import parse_settings
from moemerge.config.yaml_lines import read_yaml
from moemerge.errors import MoeMergeError, NumericalError, ResourceError
from moemerge.features.known_configs import require_loadable
from moemerge.lockstep.inputs import JobText, check_names, settings_data, source_weights
from moemerge.lockstep.models import MERGED, require_same_family
from moemerge.lockstep.output import FollowingOutput, Output, PatchedOutput
from moemerge.report.files import (
    CARD_NAME,
    CONFIG_NAME,
    REPORT_NAME,
    in_code,
    in_markdown,
    model_card,
    report_bytes,
    report_document,
)
from moemerge.runtime import ranks
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.files import read_file, read_object, read_utf8, write_whole
from moemerge.runtime.progress import counted
from moemerge.runtime.timing import Timings
from moemerge.text.domains import Domain
from moemerge.text.rows import TextSource, check_files, source_names
from moemerge.version import __version__

# They say how a run is done; its result does not depend on them.
NOT_IN_KEY = ("offload", "strict", "measure", "device", "dtype")

Reference = str | Path | ModelRef


@dataclass(frozen=True)
class RepairRequest:
    """What to repair, with what, to where. `sources` and `data` share their names."""

    merged: Reference
    out: Path
    sources: Mapping[str, Reference]
    data: Mapping[str, Sequence[TextSource]]
    settings: Any  # of the job
    weights: Mapping[str, float] = field(default_factory=dict)  # of sources; 1 where none is given
    overwrite: bool = False
    resume: bool = False
    # The merged folder was made by this very run and goes when it ends: its config says all,
    # and unchanged shards need no copy.
    temporary: bool = False
    # Without it all is solved for and reported on; nothing is written, not even a journal.
    write: bool = True
    # The data, where they were read with the same settings already.
    text: JobText | None = None


def open_models(
    request: RepairRequest, require: Callable[[OpenModel], None]
) -> tuple[OpenModel, dict[str, OpenModel]]:
    """The merged model, of which something is required, and the sources: named as the data are, of
    one family."""
    check_names(request.sources, request.data)
    source_weights(request.weights, request.sources)
    check_files(request.data)
    merged = open_model(MERGED, request.merged)
    require(merged)
    sources = {name: open_model(name, ref) for name, ref in request.sources.items()}
    for source in sources.values():
        require_same_family(merged, source)
    require_loadable(merged)  # layers behind the last router are never built here
    return merged, sources


def open_output(
    request: RepairRequest,
    merged: OpenModel,
    sources: Mapping[str, OpenModel],
    quantised: Quantised = "keep",
) -> Output:
    """OUT in the making, refused here where it must not be."""
    if not request.write:
        return Output()
    if not ranks.leads():
        return FollowingOutput()
    return PatchedOutput(
        merged.checkpoint,
        request.out,
        others=[model.checkpoint for model in sources.values()],
        overwrite=request.overwrite,
        link=request.temporary,
        in_background=resolve_device(request.settings.device).type != "cpu",
        quantised=quantised,
    )


@contextmanager
def errors_of(where: str, doing: str, remedy: str) -> Iterator[None]:
    """Errors of the mathematics name the layer; a full memory says what to change."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{where}: {error.message}", hint=error.hint) from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(
            f"{where}: out of memory {doing}",
            hint=f"{remedy}; `resume=True` keeps the finished layers if settings stay the same",
        ) from error


# --- the key ------------------------------------------------------------------------------------


def request_key(
    request: RepairRequest, domains: Sequence[Domain], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """What any repair's result depends on besides its models, as plain data."""
    settings = settings_data(request.settings)
    return {
        "order": list(request.sources),  # sums run in it, so the last bits depend on it
        "weights": source_weights(request.weights, request.sources),
        "data": {domain.name: _digest(domain) for domain in domains},
        "settings": {
            **{name: value for name, value in settings.items() if name not in NOT_IN_KEY},
            "device": device.type,
            "dtype": dtype_name(dtype),
        },
    }


def _digest(domain: Domain) -> str:
    digest = hashlib.sha256()
    for rows in (domain.rows, domain.holdout):
        digest.update(len(rows).to_bytes(8, "little"))
        for row in rows:
            digest.update(len(row).to_bytes(8, "little"))
            digest.update(row.numpy().tobytes())
    return digest.hexdigest()


# --- the report ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RepairReport(ABC):
    """A job's part of `moemerge_report.json`."""

    part: ClassVar[str]  # its name there, and of the config's block
    section: ClassVar[str]  # the card's heading
    done: ClassVar[str]  # "Routers calibrated"
    summary: ClassVar[str]  # of the model, after "2 models merged with `ties`"
    held_out: ClassVar[str] = "the rows held out"  # as the card calls them

    merged: str
    output: str
    sources: Mapping[str, str]
    weights: Mapping[str, float]
    data: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Any]
    device: str
    dtype: str
    offload: str
    memory: int  # bytes that the run was expected to need on its device
    resumed: int  # entries taken from the journal of a killed run
    layers: tuple[dict[str, Any], ...]
    notices: tuple[str, ...]
    seconds: float
    timings: Timings
    # What `diagnose` measures on the rows held out, each model on its own features: of the merge
    # and of the result. None where it was not measured.
    diagnosis: Mapping[str, Any] | None = None

    @staticmethod
    def asked(request: RepairRequest) -> dict[str, Any]:
        """The fields that repeat the request."""
        return {
            "merged": "this run's merge" if request.temporary else str(request.merged),
            "output": str(request.out),
            "sources": {name: str(ref) for name, ref in request.sources.items()},
            "weights": source_weights(request.weights, request.sources),
            "data": {name: source_names(request.data[name]) for name in request.sources},
            "settings": settings_data(request.settings),
        }

    @property
    @abstractmethod
    def totals(self) -> dict[str, Any]: ...

    @property
    @abstractmethod
    def words(self) -> str:
        """What was done, for the card."""

    @abstractmethod
    def own_json(self) -> dict[str, Any]:
        """What only this kind of job reports."""

    def to_json(self) -> dict[str, Any]:
        return {
            "merged": self.merged,
            "output": self.output,
            "sources": dict(self.sources),
            "weights": dict(self.weights),
            "data": {name: list(files) for name, files in self.data.items()},
            "settings": dict(self.settings),
            "device": self.device,
            "dtype": self.dtype,
            "offload": self.offload,
            "memory_estimate": self.memory,
            "resumed": self.resumed,
            **self.own_json(),
            "layers": list(self.layers),
            "totals": self.totals,
            "notices": list(self.notices),
            "seconds": round(self.seconds, 3),
            "timings": self.timings.to_json(),
            "diagnosis": None if self.diagnosis is None else dict(self.diagnosis),
        }


# --- the files that moemerge adds to a repaired model -------------------------------------------


def output_files(
    request: RepairRequest, merged: OpenModel, report: RepairReport
) -> dict[str, bytes]:
    """Resolved config, report and model card."""
    folder = merged.checkpoint.path
    earlier = earlier_report(folder)
    config, flags = _resolved_config(request, merged, earlier, report)
    whole = not any(isinstance(text, Mapping) for rows in request.data.values() for text in rows)
    # What earlier repairs did stays true where this one comes later in the order.
    before = ("merge", TUNING, *REPAIRS[: REPAIRS.index(report.part)])
    parts = {**{name: earlier.get(name) for name in before}, report.part: report.to_json()}
    card = _card(folder / CARD_NAME, earlier, report, config, flags if whole else None)
    return {
        CONFIG_NAME: config.encode(),
        REPORT_NAME: report_bytes(report_document(__version__, **parts)),
        CARD_NAME: card.encode(),
    }


def _resolved_config(
    request: RepairRequest, merged: OpenModel, earlier: Mapping[str, Any], report: RepairReport
) -> tuple[str, list[str]]:
    """The config with which `moemerge run` makes this model again, and the flags it needs besides.

    The merge's own config with the job's block; for a model that another tool merged, or that was
    repaired before, a config that takes it as it is.
    """
    written = merged.checkpoint.path / CONFIG_NAME
    needed = dict(earlier.get("merge", {}).get("settings", {}))
    if request.temporary and written.is_file():
        return read_utf8(written), as_flags(needed)
    block = {
        **settings_data(request.settings),
        "sources": dict(report.sources),
        "weights": dict(request.weights) or None,
        "data": {name: list(files) for name, files in report.data.items()},
    }
    block = {key: value for key, value in block.items() if value is not None}
    # A refit writes floats, or rounds as the merge before it was: `run` has one flag for both.
    rounded = block.get("requantize", "same") == "same"
    alike = rounded or "requantize" not in needed
    config = merge_config(written, {report.part: block}) if alike else None
    if config is None:
        needed.pop("requantize", None)
        if rounded and merged.checkpoint.quantisation is not None:
            needed["requantize"] = "same"
        plain = {
            "merge_method": "passthrough",
            "models": [{"model": report.merged}],
            report.part: block,
        }
        config = parse_settings(RunConfig, plain, "the resolved config")
    return dump_config(config, absolute=True), as_flags(needed)


def _card(
    written: Path,
    earlier: Mapping[str, Any],
    report: RepairReport,
    config: str,
    flags: Sequence[str] | None,
) -> str:
    """A card of our own; a card that somebody else wrote is kept and gets a section.

    `flags` are None where no config makes the model again: rows came from memory.
    """
    if not earlier and written.is_file():
        old = read_file(written).decode("utf-8", "replace").rstrip("\n")
        made = f"{report.done} with [moemerge](https://pypi.org/project/moemerge/) {__version__}."
        return f"{old}\n\n## {report.section}\n\n{made} {report.words}\n"
    merge = earlier.get("merge", {})
    inputs = merge.get("inputs", {})
    models = [
        f"- `{in_code(str(m.get('model')))}` ({in_markdown(name)})" for name, m in inputs.items()
    ] or [
        f"- `{in_code(report.merged)}` (merged)",
        *(f"- `{in_code(model)}` ({in_markdown(name)})" for name, model in report.sources.items()),
    ]
    how = (
        f"{counted(len(inputs), 'model')} merged with `{merge.get('method')}`"
        if inputs
        else "A merged model"
    )
    named = [m.get("model") for m in inputs.values()] or [*report.sources.values()]
    return model_card(
        title=Path(report.output).name,
        summary=f"{how}, {report.summary}.",
        hub_models=[part for m in named if m for part in hub_ids(str(m))],
        sections=[("Models", "\n".join(models)), (report.section, report.words)],
        config=config,
        version=__version__,
        flags=flags,
    )


# --- what a merged folder says of how it was made -------------------------------------------------

# A repair repeats it in its own report and card, and does not depend on it: what is not ours,
# damaged or edited by hand has nothing to tell.
REPAIRS = ("calibration", "refit")  # blocks of a config, parts of a report
TUNING = "tuning"  # the part of a training


def earlier_report(folder: Path) -> dict[str, Any]:
    """The folder's own report, where moemerge merged it; else nothing."""
    try:
        report = read_object(folder / REPORT_NAME)
        parse_document(MergeDocument, report.get("merge"), str(folder / REPORT_NAME))
        json.dumps(report, allow_nan=False)  # what it says is repeated, and NaN is no JSON
    except (MoeMergeError, ValueError):
        return {}
    return report


def merge_config(path: Path, blocks: Mapping[str, Any]) -> RunConfig | None:
    """A merge's config with `blocks` added; None where it cannot be read, or has a repair."""
    try:
        data = read_yaml(read_utf8(path), str(path)).data
        if any(name in data for name in REPAIRS):
            return None
        return parse_settings(RunConfig, {**data, **blocks}, str(path))
    except MoeMergeError:
        return None


# --- what is measured when OUT is there ---------------------------------------------------------


def add_diagnosis(report: RepairReport, figures: Mapping[str, Any]) -> None:
    """What was measured afterwards also goes into OUT's report and card."""
    if not ranks.leads():
        return
    folder = Path(report.output)
    path = folder / REPORT_NAME
    document = read_object(path)
    document[report.part]["diagnosis"] = dict(figures)
    write_whole(path, report_bytes(document))
    path = folder / CARD_NAME
    card = read_file(path).decode("utf-8", errors="replace")
    at = card.find("\n## ", card.rfind(f"## {report.section}\n") + 1)
    at = len(card) if at < 0 else at + 1
    words = "\n".join(diagnosis_words(figures, report.held_out))
    write_whole(path, f"{card[:at].rstrip(chr(10))}\n\n{words}\n\n{card[at:]}".encode())


def diagnosis_words(figures: Mapping[str, Any], rows: str) -> list[str]:
    """A table of the routing on rows held out, each model on its own features."""
    lines = [
        f"What `moemerge diagnose` measures on {rows}, each model on its own features:",
        "",
        "| domain | tokens | mismatch before | after | loss before | after |",
        "|---|---|---|---|---|---|",
    ]
    for name, tokens in figures["tokens"].items():
        shares = (f"{figures[f'mismatch_{end}'][name]:.1%}" for end in ("before", "after"))
        losses = (figures[f"loss_{end}"][name] for end in ("before", "after"))
        cells = [*shares, *("" if loss is None else f"{loss:.4g}" for loss in losses)]
        lines.append(f"| {in_markdown(name)} | {tokens} | {' | '.join(cells)} |")
    return lines
