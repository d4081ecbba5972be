"""Compose a MoE: compute the routers, copy the tensors, write the report and the model card."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint import CheckpointPatch, CheckpointWriter, TensorInfo, hub_ids, parse_size
from moemerge.checkpoint.model_card import in_code, model_card, own_files
from moemerge.checkpoint.output import temporary_sibling
from moemerge.checkpoint.reader import as_ref
from moemerge.config.dump import config_data
from moemerge.config.job_settings import ComposeConfig, ComposeSettings
from moemerge.config.settings import as_flags
from moemerge.config.yaml_lines import dump_document
from moemerge.conversion.composing.fit import (
    FitDomain,
    embedded_rows,
    fit_routers,
    hidden_rows,
    own_share,
    random_rows,
    require_known,
    similar_experts,
    tokenize_prompts,
)
from moemerge.conversion.composing.job import ComposeJob, prepare
from moemerge.conversion.composing.tensors import ComposedTensor
from moemerge.errors import ConfigError
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.settings import StreamSettings, forward_dtype
from moemerge.repairs.card import COMPOSITION
from moemerge.repairs.inputs import settings_data
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.progress import Progress, counted
from moemerge.runtime.ranks import own_device
from moemerge.text.domains import TextSettings, load_domain
from moemerge.text.rows import TextSource
from moemerge.text.tokens import load_tokenizer

COPIERS = 4  # threads that copy tensors


def run_compose(
    config: ComposeConfig,
    out: Path,
    settings: ComposeSettings,
    progress: Progress,
    donor: Path | None = None,
) -> ComposeReport:
    """Compose the model into `out`, which appears complete or not at all."""
    start = time.perf_counter()
    job = prepare(config, out, settings, donor)
    if config.gate_mode == "fit":
        return _run_fit(job, start, progress)
    gates = _gates(job, progress)
    report = _report(job, _notices(job, gates))
    return _write(job, out, gates, report, start, progress)


def _run_fit(job: ComposeJob, start: float, progress: Progress) -> ComposeReport:
    """Compose next to OUT, fit the routers of that model, and move it to OUT."""
    domains = _domains(job)
    notices = [notice for one in domains for notice in one.domain.notices]
    with temporary_sibling(job.out) as folder:
        place = folder / "composed"
        _write(job, place, _gates(job, progress), _report(job, ()), start, progress)
        model = open_model("composed", place)
        model.checkpoint.label = str(job.out)
        weights, rows = fit_routers(model, domains, job.old, _stream(job, model), progress)
        report = _report(job, tuple(dict.fromkeys(notices)))
        report = replace(report, routers=rows, seconds=time.perf_counter() - start)
        # Unchanged shards are linked: the other name disappears with the folder.
        with CheckpointPatch(
            model.checkpoint,
            job.out,
            overwrite=job.settings.overwrite,
            link=True,
            inputs=job.folders,
        ) as patch:
            for name, weight in weights.items():
                patch.write(name, weight)
            for name, data in _own_files(job, report).items():
                patch.add_bytes(name, data)
            patch.commit()
    return report


def _domains(job: ComposeJob) -> list[FitDomain]:
    """Read the text of every expert; experts with the same text are one domain."""
    tokenizer = load_tokenizer(job.parts.base.checkpoint.tokenizer_folder)
    bounds = TextSettings.of(job.settings)
    found: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, entry in enumerate(job.config.experts):
        found[entry.data or entry.positive_prompts].append(job.old + number)
    if len(found) == 1 and len(job.config.experts) > 1:
        raise ConfigError("all experts have the same text, so routers cannot tell them apart")
    domains = []
    for key, experts in found.items():
        name = f"expert {', '.join(map(str, experts))}"
        files = job.config.experts[experts[0] - job.old].data is not None
        texts: Sequence[TextSource] = key if files else [{"text": text} for text in key]
        domains.append(FitDomain(load_domain(name, texts, tokenizer, bounds), tuple(experts)))
    if job.config.base_data is not None:
        base = load_domain("base", job.config.base_data, tokenizer, bounds)
        domains.append(FitDomain(base, ()))
    read = [one.domain for one in domains]
    require_known(job.parts.base, [row for d in read for row in (*d.rows, *d.holdout)])
    return domains


def _stream(job: ComposeJob, model: OpenModel) -> StreamSettings:
    device = own_device(resolve_device(job.settings.device))
    dtype = forward_dtype(job.settings.dtype, model, device)
    return StreamSettings(device, dtype, job.settings.offload, narrow_experts=True)


def _initial(job: ComposeJob, layer: int, infos: Sequence[TensorInfo]) -> Tensor:
    """Return the base's own rows of a router, followed by random ones, or by zeros to fit."""
    rows = torch.zeros(sum(info.rows for info in infos), infos[0].shape[1])
    if job.old:
        rows[: job.old] = job.parts.base.checkpoint.read(infos[0].name)
    if job.config.gate_mode == "random":
        new, width = len(rows) - job.old, rows.shape[1]
        rows[job.old :] = random_rows(layer, new, width, job.settings.seed)
    return rows


def _gates(job: ComposeJob, progress: Progress) -> dict[int, Tensor]:
    """Return the rows of every layer's router; the gate of a shared expert is the last row."""
    routers, mode = job.routers, job.config.gate_mode
    base, layers = job.parts.base, list(routers)
    if mode in ("random", "fit"):
        return {layer: _initial(job, layer, infos) for layer, infos in routers.items()}
    gated = any(len(infos) > 1 for infos in routers.values())
    shared = job.config.shared_experts if gated else ()
    prompts = tokenize_prompts(base, (*job.config.experts, *shared))
    if mode == "cheap_embed":
        return embedded_rows(base, prompts, layers)
    return hidden_rows(base, prompts, layers, _stream(job, base), progress)


def _notices(job: ComposeJob, gates: Mapping[int, Tensor]) -> tuple[str, ...]:
    count = len(job.parts.experts)
    if job.config.gate_mode == "random" or count == 1:
        return ()
    layers = similar_experts({layer: rows[:count] for layer, rows in gates.items()})
    if not layers:
        return ()
    listed = "all layers" if len(layers) == len(gates) else f"layers {', '.join(map(str, layers))}"
    return (f"two experts have almost the same router row in {listed}: use prompts that differ",)


def _report(job: ComposeJob, notices: tuple[str, ...]) -> ComposeReport:
    infos = [tensor.info for tensor in job.tensors]
    attention = job.config.attention or {}

    def named(model: OpenModel) -> str:
        return str(as_ref(model.label).as_named_in(job.out))

    return ComposeReport(
        base=named(job.parts.base),
        experts=tuple(map(named, job.parts.experts)),
        shared_expert=named(job.parts.shared[0]) if job.parts.shared else None,
        architecture=str(job.model_config["model_type"]),
        gate_mode=job.config.gate_mode,
        experts_per_token=job.top_k,
        added_to=job.old,
        attention=attention.get("merge_method"),
        settings=settings_data(job.settings),
        output=str(job.out),
        output_tensors=len(infos),
        output_bytes=sum(info.nbytes for info in infos),
        output_parameters=sum(info.nbytes // info.dtype.itemsize for info in infos),
        dtypes=tuple(sorted({str(info.dtype) for info in infos})),
        notices=(*([job.target.notice] if job.target and job.target.notice else []), *notices),
    )


def _write(
    job: ComposeJob,
    out: Path,
    gates: Mapping[int, Tensor],
    report: ComposeReport,
    start: float,
    progress: Progress,
) -> ComposeReport:
    with CheckpointWriter(
        out,
        [tensor.info for tensor in job.tensors],
        shard_bytes=parse_size(job.settings.out_shard_size),
        overwrite=job.settings.overwrite,
        inputs=job.folders,
    ) as writer:
        _copy(job, writer, gates, progress)
        report = replace(report, seconds=time.perf_counter() - start)
        # Tokenizer and generation config are the base's.
        for name, path in job.parts.base.checkpoint.companions().items():
            writer.add_file(path, name)
        for name, data in _own_files(job, report).items():
            writer.add_bytes(name, data)
        for model in job.parts.models:
            model.checkpoint.require_unchanged()
        writer.commit()
    return report


def _copy(
    job: ComposeJob, writer: CheckpointWriter, gates: Mapping[int, Tensor], progress: Progress
) -> None:
    for layer, infos in job.routers.items():
        parts = torch.split(gates[layer], [info.rows for info in infos])
        for info, rows in zip(infos, parts, strict=True):
            writer.write(info.name, rows.to(info.dtype.torch))
    copied = [tensor for tensor in job.tensors if tensor.copies]
    progress.start("composing", sum(tensor.info.nbytes for tensor in copied), unit="B")

    def write(tensor: ComposedTensor) -> None:
        tensor.write(writer)
        progress.advance(tensor.info.nbytes)

    with ThreadPoolExecutor(COPIERS, "moemerge-compose") as pool:
        list(pool.map(write, copied))
    progress.finish()


def _own_files(job: ComposeJob, report: ComposeReport) -> dict[str, bytes]:
    """Return the two configs, the report and the model card."""
    config = dump_document(config_data(job.config, job.out))
    card = compose_card(report, config, job.settings)
    return {
        "config.json": (json.dumps(dict(job.model_config), indent=2) + "\n").encode(),
        **own_files(config, card, **{COMPOSITION: report.to_json()}),
    }


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
        tags=("moe", "moemerge"),
        flags=as_flags(given),
    )
