"""Whether statistics belong to a model, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping

from moemerge.architectures.architecture import Architecture
from moemerge.checkpoint import Checkpoint
from moemerge.errors import CheckpointError, TokenizerError
from moemerge.statistics.provenance import (
    Provenance,
    all_units,
    family_name,
    model_fingerprint,
    tokenizer_fingerprint,
)


def check_fits(
    path: str,
    provenance: Provenance,
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
    checkpoint: Checkpoint,
    architecture: Architecture,
) -> None:
    """Raise for statistics of another family, shape, model or tokenizer, the plainest first."""
    whose = f"{path} holds statistics of {provenance.model}"
    again = f"run `moemerge stats {checkpoint.label} OUT.stats --data FILE` on what is merged"
    family = family_name(architecture)
    if provenance.family != family:
        raise CheckpointError(
            f"{whose}, of the family {provenance.family}, but {name!r} ({checkpoint.label}) is "
            f"{family}",
            hint=again,
        )
    units = all_units(checkpoint, architecture)
    for key, shape in shapes.items():
        if key not in units:
            raise CheckpointError(
                f"{whose}, which has {key}; {name!r} ({checkpoint.label}) has no such tensor",
                hint=again,
            )
        if units[key].shape != shape:
            raise CheckpointError(
                f"{whose}, where {key} is {list(shape)}; in {name!r} ({checkpoint.label}) it is "
                f"{list(units[key].shape)}",
                hint=again,
            )
    if provenance.model_fingerprint != model_fingerprint(checkpoint, architecture):
        raise CheckpointError(
            f"{whose}; {name!r} ({checkpoint.label}) has the same shapes but other weights",
            hint=again,
        )
    vocabulary = tokenizer_fingerprint(checkpoint.tokenizer_folder)
    if None not in (vocabulary, provenance.tokenizer_fingerprint) and (
        vocabulary != provenance.tokenizer_fingerprint
    ):
        raise TokenizerError(
            f"{whose} with another tokenizer than {name!r} ({checkpoint.label}) has now",
            hint=again,
        )
