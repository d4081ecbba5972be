"""What a stream hands out where it stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moemerge.errors import UsageError
from moemerge.features.weights import Weights
from moemerge.features.workers import Pause, PauseKind
from moemerge.text.batches import Batch


@dataclass(frozen=True, eq=False)
class Arrival:
    """One batch at a stop, and the tensors it is about to give the module: rows of real tokens."""

    batch: Batch
    given: tuple[Tensor, ...]


class Stop:
    """All batches wait here: read what they bring, replace weights, go on.

    Valid until the iteration continues; inputs that are not held elsewhere are freed then.
    """

    def __init__(
        self,
        pause: Pause,
        layer: int,
        weights: Weights,
        arrivals: Sequence[Arrival],
        shared: bool = False,
    ) -> None:
        self.kind: PauseKind = pause.kind
        self.path = pause.key  # of the module or layer that is about to run
        self.layer = layer  # that runs; at a layer's stop the one to come, at the end one more
        # Whether every batch brings the very tensor that it brought to the stop before.
        self.shared = shared
        self._arrivals = arrivals
        self._weights = weights

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arrival.batch.domain for arrival in self._arrivals))

    @property
    def arrivals(self) -> Sequence[Arrival]:
        """Every batch with all tensors it brings; empty where none were asked for."""
        return self._arrivals

    def inputs(self, domain: str, *, holdout: bool = False) -> list[Tensor]:
        """The module's inputs, a (tokens, d) tensor per batch, padding left out."""
        return [x for _, x in self.by_batch(domain, holdout=holdout)]

    def by_batch(self, domain: str, *, holdout: bool = False) -> list[tuple[Batch, Tensor]]:
        """The same with the batch each comes from, to pair tokens of several models."""
        if domain not in self.domains:
            raise UsageError(f"no domain {domain!r}; there are {', '.join(self.domains)}")
        return [
            (arrival.batch, arrival.given[0])
            for arrival in self._arrivals
            if arrival.batch.domain == domain and arrival.batch.holdout == holdout
        ]

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with these parameters, by name in memory: rounded to the dtype they are stored in.

        A tensor that has this dtype already is taken as it is; any other must be finite once it is
        rounded.
        """
        for name, value in tensors.items():
            self._weights.put(name, value)

    def replace_stored(self, tensors: Mapping[str, Tensor]) -> None:
        """The same by name on disk, for parameters that are stored as one tensor each."""
        self.replace({self._weights.names.in_memory(n): t for n, t in tensors.items()})

    def release(self) -> None:
        self._arrivals = ()
