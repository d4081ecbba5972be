"""Write a checkpoint with the routers of another: the paper's cross-evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint import CheckpointPatch, check_output, require_space
from moemerge.checkpoint.model_card import CARD_NAME, CONFIG_NAME, REPORT_NAME, report_file
from moemerge.config.fields import LayerSelection
from moemerge.config.models import ModelLike
from moemerge.config.yaml_lines import config_for
from moemerge.errors import ArchitectureError, NumericalError
from moemerge.families.opened import OpenModel, open_model
from moemerge.repairs.routers import (
    layers_among,
    pair_routing,
    require_same_family,
    routing_tensors,
)
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.progress import Progress
from moemerge.version import __version__


@dataclass(frozen=True)
class SwapReport:
    """Which tensors came from which model."""

    model: str
    routers_of: str
    output: str
    layers: tuple[int, ...]
    tensors: tuple[str, ...]  # names in the output's checkpoint
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("layers", "tensors", "notices")}
        return {**asdict(self), **lists}


def swap_routers(
    model: ModelLike,
    donor: ModelLike,
    out: Path,
    *,
    layers: LayerSelection,
    link: bool,
    overwrite: bool,
    progress: Progress,
) -> SwapReport:
    """Write `model` with the routers of `donor` to `out`, complete or not at all."""
    ours, theirs = open_model(str(model), model), open_model(str(donor), donor)
    _require_routers(ours)
    require_same_family(ours, theirs, hint="routers fit a model of their own family alone")
    inputs = [folder for m in (ours, theirs) for folder in m.checkpoint.folders]
    check_output(out, overwrite=overwrite, inputs=inputs)
    with_routers, count = _layers_with_routers(ours), ours.architecture.num_layers
    chosen = layers_among(with_routers, count, layers, "swap")
    names = pair_routing(ours, theirs, chosen)
    require_space(out, ours.checkpoint.total_bytes)
    with CheckpointPatch(
        ours.checkpoint, out, overwrite=overwrite, link=link, inputs=inputs
    ) as patch:
        notices: list[str] = []
        progress.start("swapping", len(names), unit="tensors")
        for name, other in names.items():
            router = theirs.checkpoint.read(other)
            _require_finite(router, f"{theirs.label}: {other} holds NaN or infinity")
            tensor, rounding = _fitted(ours, name, router)
            _require_finite(
                tensor, f"{theirs.label}: {other} is too large for {tensor.dtype}, as {name} is"
            )
            notices += rounding
            patch.write(name, tensor)
            progress.advance(1)
        progress.finish()
        report = SwapReport(
            model=ours.label,
            routers_of=theirs.label,
            output=str(out),
            layers=chosen,
            tensors=tuple(names),
            notices=tuple(notices),
        )
        for file, content in _provenance(ours.checkpoint.path, report).items():
            patch.add_bytes(file, content)
        patch.commit()
    for notice in notices:
        progress.note(notice)
    return report


def _provenance(folder: Path, report: SwapReport) -> dict[str, bytes]:
    """Replace the statements about replaced routers in the model's report and card."""
    layers = ", ".join(map(str, report.layers))
    words = f"The routers of layers {layers} are those of `{report.routers_of}`"
    files = {REPORT_NAME: report_file(swap=report.to_json())}
    if os.path.isfile(folder / CARD_NAME):
        made = f"put there by `moemerge swap-routers` {__version__}; all other statements here hold"
        section = f"{words}, {made} of `{report.model}`, from which all other tensors come."
        card = (folder / CARD_NAME).read_bytes().rstrip(b"\n")
        files[CARD_NAME] = card + f"\n\n## Swapped routers\n\n{section}\n".encode()
    if os.path.isfile(folder / CONFIG_NAME):
        text = config_for(folder / CONFIG_NAME, Path(report.output))
        if CARD_NAME in files:
            old = (folder / CONFIG_NAME).read_bytes()
            files[CARD_NAME] = files[CARD_NAME].replace(old, text.encode())
        files[CONFIG_NAME] = f"# {words} (moemerge swap-routers).\n{text}".encode()
    return files


def _require_routers(model: OpenModel) -> None:
    if model.architecture.family is None or not _layers_with_routers(model):
        what = model.architecture.notice or (
            f"{model.architecture.model_type or 'an unknown type'} has no experts, so there is no "
            "router to swap"
        )
        raise ArchitectureError(
            f"{model.label}: {what}", hint="`moemerge ls architectures` lists what can be"
        )


def _layers_with_routers(model: OpenModel) -> Sequence[int]:
    """Return the layers of the model that have a router tensor, ascending."""
    layers = {model.architecture.layer_of(name) for name in routing_tensors(model).values()}
    return sorted(layer for layer in layers if layer is not None)


def _require_finite(tensor: Tensor, message: str) -> None:
    if not bool(torch.isfinite(tensor.float()).all()):
        raise NumericalError(message, hint="take the routers of a sound model")


def _fitted(model: OpenModel, name: str, tensor: Tensor) -> tuple[Tensor, list[str]]:
    """Return the donor's tensor in the model's dtype, and a notice if that rounds it."""
    info = model.checkpoint.tensors[name]
    fitted = tensor.to(info.dtype.torch).reshape(info.shape)
    if bool((fitted.to(tensor.dtype).reshape(tensor.shape) == tensor).all()):
        return fitted, []
    stored = Dtype.of(tensor.dtype)
    return fitted, [f"{name}: rounded from {stored} to {info.dtype}, which the model stores"]
