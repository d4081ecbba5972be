"""What `moemerge stats` tells when it is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moemerge.statistics import Provenance


@dataclass(frozen=True)
class CollectReport:
    """The file that was written."""

    kind: str
    output: str
    provenance: Provenance
    units: int  # that have statistics
    units_without: int  # of the checkpoint: norms, biases, embeddings, and what `notices` names
    unvisited_experts: tuple[str, ...]  # units of experts that no token was routed to
    nbytes: int
    seconds: float
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["provenance"] = self.provenance.to_json()
        return found
