"""The request of a repair: open its models and its output, and derive the key of its journal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch

from moemerge.checkpoint.patch import Quantised
from moemerge.config.models import ModelRef
from moemerge.config.settings import ForwardSettings
from moemerge.errors import NumericalError, ResourceError
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.known_configs import require_loadable
from moemerge.repairs.lockstep.inputs import JobText, check_names, settings_data, source_weights
from moemerge.repairs.lockstep.models import MERGED, require_same_family
from moemerge.repairs.lockstep.output import FollowingOutput, Output, PatchedOutput
from moemerge.runtime.devices import is_out_of_memory, resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.ranks import Ranks
from moemerge.text.domains import Domain
from moemerge.text.rows import TextSource, check_files

# Settings that the result does not depend on.
NOT_IN_KEY = ("offload", "strict", "measure", "device", "dtype")
S = TypeVar("S", bound=ForwardSettings)

Reference = str | Path | ModelRef


@dataclass(frozen=True)
class RepairRequest(Generic[S]):
    """The model to repair, its sources and their text under the same names, and the output."""

    merged: Reference
    out: Path
    sources: Mapping[str, Reference]
    data: Mapping[str, Sequence[TextSource]]
    settings: S
    weights: Mapping[str, float] = field(default_factory=dict)  # of sources; default: 1
    # Text that is only measured, before and after.
    check: Mapping[str, Sequence[TextSource]] = field(default_factory=dict)
    # Files with the kept experts of sources that have more experts than the model.
    experts: Mapping[str, str | Path] = field(default_factory=dict)
    overwrite: bool = False
    resume: bool = False  # never replace unfinished work, not even if `overwrite`
    # The same run made the merged folder and removes it at the end: its config is complete, and
    # unchanged shards can be linked instead of copied.
    temporary: bool = False
    # Names earlier merges of the same config in place of their temporary folders.
    shown: Callable[[str], str] = str
    # If False, everything is computed and reported, but neither OUT nor a journal is written.
    write: bool = True
    # The data, if they were read with the same settings before.
    text: JobText | None = None

    @property
    def replaces_unfinished(self) -> bool:
        """Whether unfinished work of another run may be replaced."""
        return self.overwrite and not self.resume


def open_models(
    request: RepairRequest[S], require: Callable[[OpenModel], None]
) -> tuple[OpenModel, dict[str, OpenModel]]:
    """Open the merged model and its sources; refuse wrong names, missing files, mixed families.

    `require` refuses a merged model that the job cannot repair.
    """
    check_names(request.sources, request.data)
    source_weights(request.weights, request.sources)
    check_files(request.data)
    check_files(request.check, "check")
    merged = open_model(MERGED, request.merged)
    require(merged)
    sources = {name: open_model(name, ref) for name, ref in request.sources.items()}
    for source in sources.values():
        require_same_family(merged, source)
    require_loadable(merged)  # layers after the last router are never built here
    return merged, sources


def open_output(
    request: RepairRequest[S],
    merged: OpenModel,
    sources: Mapping[str, OpenModel],
    ranks: Ranks,
    quantised: Quantised = "keep",
) -> Output:
    """Open OUT for writing, or refuse it."""
    if not request.write:
        return Output()
    if not ranks.leads:
        return FollowingOutput(ranks)
    return PatchedOutput(
        merged.checkpoint,
        request.out,
        others=[model.checkpoint for model in sources.values()],
        overwrite=request.overwrite,
        link=request.temporary,
        in_background=resolve_device(request.settings.device).type != "cpu",
        quantised=quantised,
        ranks=ranks,
    )


LAYERS_KEPT: Final = "finished layers are kept if other settings stay the same"


@contextmanager
def errors_of(where: str, doing: str, remedy: str) -> Iterator[None]:
    """Add the layer to numerical errors, and a remedy to out-of-memory errors."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{where}: {error.message}", hint=error.hint) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(f"{where}: out of memory {doing}", hint=remedy) from error


def request_key(
    request: RepairRequest[S], domains: Sequence[Domain], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return everything but the models that the result of a repair depends on, as plain data."""
    settings = settings_data(request.settings)
    return {
        "order": list(request.sources),  # of the sums, which their last bits depend on
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
