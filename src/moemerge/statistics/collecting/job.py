"""The request for statistics, and the job after all checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from moemerge.checkpoint import require_space
from moemerge.config.job_settings import CollectingSettings
from moemerge.config.models import ModelRef
from moemerge.config.parameters import StatisticsKind
from moemerge.errors import DataError
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.outputs import FileKind, check_output_file
from moemerge.runtime.ranks import Ranks, own_device
from moemerge.statistics import Provenance
from moemerge.statistics.file import stored_shape
from moemerge.statistics.provenance import (
    data_fingerprint,
    family_name,
    model_fingerprint,
    tokenizer_fingerprint,
)
from moemerge.text.batches import DEFAULT_BATCH_TOKENS, Batch, make_batches, own_share
from moemerge.text.domains import Domain, TextSettings, load_domain
from moemerge.text.rows import TextSource, check_files
from moemerge.text.tokens import load_tokenizer
from moemerge.version import __version__

# The name affects the choice of rows. A fixed one selects the same rows for every model name.
DOMAIN = "text"


@dataclass(frozen=True)
class CollectRequest:
    """A request: model, text and output file."""

    model: str | Path | ModelRef
    out: Path
    data: Sequence[TextSource]
    settings: CollectingSettings
    overwrite: bool = False


@dataclass(frozen=True)
class CollectingJob:
    """A checked request, ready to run."""

    request: CollectRequest
    model: OpenModel
    domain: Domain
    stream: StreamSettings
    provenance: Provenance
    ranks: Ranks

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Return this rank's share of the text."""
        most = min(DEFAULT_BATCH_TOKENS, batch_tokens(self.model, self.stream.device))
        return own_share(make_batches([self.domain], batch_tokens=most), self.ranks)


def prepare(request: CollectRequest, ranks: Ranks) -> CollectingJob:
    """Check output, files, model and space; read the text."""
    settings = request.settings
    if ranks.leads:
        check_output_file(
            request.out,
            FileKind.STATISTICS,
            overwrite=request.overwrite,
            inputs=(request.model, *request.data),
        )
    if not request.data:
        raise DataError("no text given", hint="name at least one file: `data=FILE.jsonl`")
    check_files({DOMAIN: request.data})
    device = own_device(resolve_device(settings.device))
    model = open_model("model", request.model)
    model.require_readable("dequantise it to bfloat16 first and use that folder")
    units = model.architecture.units_by_key.values()
    shapes = [unit.shape for unit in units if len(unit.shape) == 2]
    if ranks.leads:
        require_space(request.out, _output_bytes(settings.kind, shapes))
    folder = model.checkpoint.tokenizer_folder
    domain = load_domain(DOMAIN, request.data, load_tokenizer(folder), TextSettings.of(settings))
    dtype = _forward_dtype(settings, model, device)
    return CollectingJob(
        request=request,
        model=model,
        domain=domain,
        stream=StreamSettings(device, dtype, settings.offload),
        provenance=Provenance(
            model=model.label,
            family=family_name(model.architecture),
            model_fingerprint=model_fingerprint(model.checkpoint, model.architecture),
            tokenizer_fingerprint=tokenizer_fingerprint(folder),
            data_fingerprint=data_fingerprint(domain.rows),
            tokens=domain.tokens,
            sequences=len(domain.rows),
            seed=settings.seed,
            version=__version__,
            dtype=dtype_name(dtype),
            device=device.type,
        ),
        ranks=ranks,
    )


def _forward_dtype(
    settings: CollectingSettings, model: OpenModel, device: torch.device
) -> torch.dtype:
    """Return the dtype of the forward pass: gradients avoid float16 unless it was requested."""
    dtype = forward_dtype(settings.dtype, model, device)
    backward = settings.kind in ("fisher", "sensitivity")
    small = settings.dtype == "auto" and backward and dtype == torch.float16
    return torch.float32 if small else dtype


def _output_bytes(kind: StatisticsKind, shapes: Sequence[tuple[int, ...]]) -> int:
    """Estimate the file size: an upper bound for Fisher; two units share an input on average."""
    total = sum(4 * math.prod(stored_shape(kind, shape)) for shape in shapes)
    return total if kind in ("fisher", "sensitivity") else total // 2
