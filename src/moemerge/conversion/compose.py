"""Compose a MoE of dense models, or add experts to a MoE: `moemerge compose`."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from moemerge.checkpoint import (
    CheckpointPatch,
    CheckpointWriter,
    TensorInfo,
    check_output,
    hub_ids,
    main_dtype,
    parse_size,
    require_space,
)
from moemerge.checkpoint.model_card import in_code, model_card, own_files
from moemerge.checkpoint.output import temporary_sibling
from moemerge.checkpoint.reader import as_ref
from moemerge.config.dump import config_data
from moemerge.config.faults import Fault
from moemerge.config.job_settings import ComposeConfig, ComposeSettings
from moemerge.config.models import ModelRef
from moemerge.config.settings import as_flags
from moemerge.config.yaml_lines import (
    COMPOSITION as COMPOSE_FILE,
)
from moemerge.config.yaml_lines import (
    dump_document,
    read_document,
    require_kind,
)
from moemerge.conversion.compose_routers import (
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
from moemerge.conversion.compose_targets import (
    NOT_CARRIED,
    TOP_K,
    MoeTarget,
    require_alike,
    require_places,
    target_for,
)
from moemerge.conversion.compose_tensors import (
    ComposedTensor,
    Parts,
    composed_tensors,
    grown_tensors,
    mlp_layers,
)
from moemerge.errors import ArchitectureError, ConfigError
from moemerge.families.names import split_layer
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.known_configs import check_loadable, require_loadable
from moemerge.forward.settings import StreamSettings, forward_dtype
from moemerge.repairs.card import COMPOSITION
from moemerge.repairs.experts import config_with_experts
from moemerge.repairs.inputs import settings_data
from moemerge.runtime.devices import check_device, resolve_device
from moemerge.runtime.dtypes import parse_dtype
from moemerge.runtime.progress import Progress, counted
from moemerge.runtime.ranks import own_device
from moemerge.text.domains import TextSettings, load_domain
from moemerge.text.rows import TextSource
from moemerge.text.tokens import load_tokenizer

DEFAULT_TOP_K: Final = 2
OTHER_FILES_BYTES: Final = 64 * 2**20  # space for config, tokenizer, report and card
COPIERS: Final = 4  # threads that copy tensors


def load_compose_config(source: str | Path | Mapping[str, Any]) -> ComposeConfig:
    """Read a config and check all of it that needs no model."""
    document = read_document(source)
    require_kind(document, COMPOSE_FILE)
    return document.parse(ComposeConfig, _faults)


def _faults(config: ComposeConfig) -> list[Fault]:
    faults = []
    mode = config.gate_mode
    if len(config.shared_experts) > 1:
        faults.append(Fault(("shared_experts", 1), "only one shared expert is supported"))
    for number, expert in enumerate(config.experts):
        needs = "`data` or `positive_prompts`" if mode == "fit" else "`positive_prompts`"
        given = expert.positive_prompts or (mode == "fit" and expert.data)
        if mode != "random" and not given:
            text = f"{needs} is missing, which `gate_mode: {mode}` needs"
            faults.append(Fault(("experts", number), text))
        if expert.data and mode != "fit":
            text = f"`gate_mode: {mode}` does not read text files; use `gate_mode: fit`"
            faults.append(Fault(("experts", number, "data"), text))
    return faults


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


# --- checks of models, config and output, before any tensor is read -------------------------------


@dataclass(frozen=True)
class ComposeJob:
    """A checked request."""

    config: ComposeConfig
    settings: ComposeSettings
    out: Path
    parts: Parts
    target: MoeTarget | None  # None: experts are added to a MoE
    tensors: tuple[ComposedTensor, ...]
    model_config: Mapping[str, Any]  # config.json of OUT

    @property
    def routers(self) -> dict[int, list[TensorInfo]]:
        """The routers by layer, each with the gate of a shared expert if there is one."""
        found: dict[int, list[TensorInfo]] = defaultdict(list)
        for tensor in self.tensors:
            place = split_layer(tensor.info.name)
            if not tensor.copies and place is not None:
                found[place.layer].append(tensor.info)
        return found

    @property
    def old(self) -> int:
        """The number of experts that the base has already."""
        return 0 if self.target is not None else self.parts.base.architecture.num_experts or 0

    @property
    def top_k(self) -> int:
        if self.target is not None:
            return int(self.model_config[TOP_K])
        gate = self.parts.base.architecture.routers()[0].gate
        return 0 if gate is None else gate.top_k

    @property
    def folders(self) -> list[Path]:
        return [folder for model in self.parts.models for folder in model.checkpoint.folders]


def prepare(
    config: ComposeConfig, out: Path, settings: ComposeSettings, donor: Path | None = None
) -> ComposeJob:
    """Check models, settings and output, before any tensor is read.

    `donor` is a merge that replaces the base.
    """
    parse_size(settings.out_shard_size)
    check_device(settings.device)
    check_output(out, overwrite=settings.overwrite)
    opened: dict[ModelRef, OpenModel] = {}

    def model(ref: ModelRef) -> OpenModel:
        if ref not in opened:
            opened[ref] = open_model(str(ref), ref)
            opened[ref].require_readable(hint="dequantise it first")
        return opened[ref]

    base = model(config.base_model) if donor is None else open_model("attention", donor)
    if donor is not None:
        base.checkpoint.label = str(config.base_model)
    shared = next(((model(e.source_model), e.residual_scale) for e in config.shared_experts), None)
    parts = Parts(base, tuple(model(entry.source_model) for entry in config.experts), shared)
    for one in parts.models:
        require_loadable(one)
        if one is not base and one.architecture.is_moe:
            raise ArchitectureError(
                f"{one.label} is a MoE; experts are MLPs of dense models",
                hint="name a MoE as base_model to add experts to it",
            )
    require_alike(base, parts.models)
    target, tensors, made = (_grown if base.architecture.is_moe else _composed)(config, parts)
    infos = {tensor.info.name: tensor.info for tensor in tensors}
    # `torch_dtype` is read by all versions of transformers.
    keys = [key for key in ("dtype", "torch_dtype") if key in made] or ["torch_dtype"]
    made |= dict.fromkeys(keys, str(main_dtype(infos.values())))
    job = ComposeJob(config, settings, out, parts, target, tuple(tensors), made)
    check_loadable(job.model_config, infos, "the composed config.json")
    check_output(out, overwrite=settings.overwrite, inputs=job.folders)
    require_space(out, sum(info.nbytes for info in infos.values()) + OTHER_FILES_BYTES)
    return job


# What a model consists of: its target, its tensors, and its config without the dtype.
Composition = tuple[MoeTarget | None, list[ComposedTensor], dict[str, Any]]


def _composed(config: ComposeConfig, parts: Parts) -> Composition:
    """Compose a MoE of dense models."""
    base, count = parts.base, len(parts.experts)
    dtype = None if config.dtype is None else parse_dtype(config.dtype)
    target = target_for(base, config.architecture, shared=parts.shared is not None)
    for other in parts.models:
        if other.architecture.model_type not in target.dense:
            raise ArchitectureError(
                f"{other.label} is a {other.architecture.model_type} model; experts of "
                f"{target.model_type} come from: {', '.join(target.dense)}"
            )
    top_k = config.experts_per_token or min(DEFAULT_TOP_K, count)
    if top_k > count:
        raise ConfigError(f"experts_per_token is {top_k}, but there are {count} experts")
    if config.base_data is not None:
        raise ConfigError(
            "base_data is text of a base that has experts already",
            hint="text for which the base should be used: the `data` of an expert",
        )
    gated = config.gate_mode in ("hidden", "cheap_embed") and target.shared and target.shared.gate
    if gated and any(not entry.positive_prompts for entry in config.shared_experts):
        raise ConfigError(
            f"shared_experts: `positive_prompts` is missing, which {target.model_type} needs with "
            f"`gate_mode: {config.gate_mode}`",
            hint="prompts for which the shared expert should be used",
        )
    if config.gate_mode == "fit" and target.notice:
        raise ConfigError(f"gate_mode: fit runs the composed model, but {target.notice}")
    tensors = composed_tensors(parts, target, dtype)
    width = next(iter(mlp_layers(base).values())).mlp["gate"].shape[0]
    made = target.config(base, count, top_k, width, shared=parts.shared is not None)
    copied = {tensor.info.name for tensor in tensors} & base.checkpoint.tensors.keys()
    require_places(made, copied, base.label)
    return target, tensors, made


def _grown(config: ComposeConfig, parts: Parts) -> Composition:
    """Add experts to a MoE."""
    base = parts.base
    gate = next((r.gate for r in base.architecture.routers()), None)
    if gate is None:
        raise ArchitectureError(f"{base.label}: routers of this family are not known")
    wrong = {
        "gate_mode": config.gate_mode not in ("fit", "random"),
        "shared_experts": bool(config.shared_experts),
        "architecture": config.architecture not in (None, base.architecture.model_type),
        "experts_per_token": config.experts_per_token not in (None, gate.top_k),
    }
    for key in (key for key, bad in wrong.items() if bad):
        value = getattr(config, key)
        raise ConfigError(
            f"{key}: {value!r:.80} is not possible if {base.label}, which has experts, is the base",
            hint="`fit` keeps its routing on `base_data`; `random` is for training afterwards"
            if key == "gate_mode"
            else "remove the key",
        )
    if config.gate_mode == "fit" and config.base_data is None:
        raise ConfigError(
            "base_data is missing: text on which the base must keep its routing",
            hint="`base_data: general.jsonl`",
        )
    count = (base.architecture.num_experts or 0) + len(parts.experts)
    dtype = None if config.dtype is None else parse_dtype(config.dtype)
    made = config_with_experts(base, count)
    made = {key: value for key, value in made.items() if key not in NOT_CARRIED}
    return None, grown_tensors(parts, made, dtype), made
