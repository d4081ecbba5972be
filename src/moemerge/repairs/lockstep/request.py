"""The request of a repair: open its models and its output, and derive the key of its journal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch

from moemerge.checkpoint.patch import Quantised
from moemerge.config.settings import ForwardSettings
from moemerge.errors import NumericalError, ResourceError
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.known_configs import require_loadable
from moemerge.repairs.inputs import RepairRequest as RepairRequest
from moemerge.repairs.inputs import check_names, settings_data, source_weights
from moemerge.repairs.lockstep.models import MERGED, require_same_family
from moemerge.repairs.lockstep.output import FollowingOutput, Output, PatchedOutput
from moemerge.runtime.devices import is_out_of_memory, resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.ranks import Ranks
from moemerge.text.domains import Domain
from moemerge.text.rows import check_files


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


NOT_IN_KEY = ("offload", "strict", "measure", "device", "dtype")
S = TypeVar("S", bound=ForwardSettings)
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
