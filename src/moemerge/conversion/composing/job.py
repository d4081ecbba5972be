"""Check the request for a composition: models, config, output, and the tensors of the result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moemerge.checkpoint import TensorInfo, check_output, main_dtype, parse_size, require_space
from moemerge.config.faults import Fault
from moemerge.config.job_settings import ComposeConfig, ComposeSettings
from moemerge.config.models import ModelRef
from moemerge.config.yaml_lines import COMPOSITION, read_document, require_kind
from moemerge.conversion.composing.targets import (
    NOT_CARRIED,
    TOP_K,
    MoeTarget,
    require_alike,
    require_places,
    target_for,
)
from moemerge.conversion.composing.tensors import (
    ComposedTensor,
    Parts,
    composed_tensors,
    grown_tensors,
    mlp_layers,
)
from moemerge.errors import ArchitectureError, ConfigError
from moemerge.families.config_check import check_config, check_model_config
from moemerge.families.names import split_layer
from moemerge.families.opened import OpenModel, open_model
from moemerge.repairs.experts import config_with_experts
from moemerge.runtime.devices import check_device
from moemerge.runtime.dtypes import Dtype, parse_dtype

DEFAULT_TOP_K = 2
OTHER_FILES_BYTES = 64 * 2**20  # space for config, tokenizer, report and card


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


def load_compose_config(source: str | Path | Mapping[str, Any]) -> ComposeConfig:
    """Read a config and check all of it that needs no model."""
    document = read_document(source)
    require_kind(document, COMPOSITION)
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


# --- checks -------------------------------------------------------------------------------------


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
        check_model_config(one)
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
    check_config(job.model_config, infos, "the composed config.json")
    check_output(out, overwrite=settings.overwrite, inputs=job.folders)
    require_space(out, sum(info.nbytes for info in infos.values()) + OTHER_FILES_BYTES)
    return job


# What a model consists of: its target, its tensors, and its config without the dtype.
Composition = tuple[MoeTarget | None, list[ComposedTensor], dict[str, Any]]


def _composed(config: ComposeConfig, parts: Parts) -> Composition:
    """Compose a MoE of dense models."""
    base, count = parts.base, len(parts.experts)
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
    tensors = composed_tensors(parts, target, _dtype(config))
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
    made = config_with_experts(base, count)
    made = {key: value for key, value in made.items() if key not in NOT_CARRIED}
    return None, grown_tensors(parts, made, _dtype(config)), made


def _dtype(config: ComposeConfig) -> Dtype | None:
    return None if config.dtype is None else parse_dtype(config.dtype)
