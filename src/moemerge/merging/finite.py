"""Check that everything a merge reads and writes is finite."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from moemerge.errors import NumericalError
from moemerge.merging.plan import MergeBlock, MergePlan
from moemerge.runtime.progress import counted, first_few

if TYPE_CHECKING:
    from torch import Tensor

TENSORS_NAMED = 3  # in one notice


def is_finite(tensor: Tensor) -> bool:
    """Return whether there is no NaN or infinity. Also False if the sum overflows."""
    # One pass at memory speed: a finite sum has only finite terms.
    return math.isfinite(tensor.sum().item())


class FiniteCheck:
    """Refuses or records what is not finite. Thread-safe."""

    def __init__(self, plan: MergePlan, *, allow: bool) -> None:
        self._plan = plan
        self._allow = allow
        self.noted: dict[str, dict[str, None]] = {}  # model -> tensors that are not finite
        self._lock = threading.Lock()

    def read(self, tensor: Tensor, model: str, name: str) -> None:
        """Refuse or record an input tensor (or a part of it) that is not finite."""
        if not tensor.is_floating_point() or is_finite(tensor):
            return
        bad = int((~tensor.isfinite()).sum())
        if not bad:
            return
        label = self._plan.models[model].label
        if not self._allow:
            raise NumericalError(
                f"{label}: tensor {name} holds {bad} non-finite values "
                f"(NaN or infinity) among {tensor.numel()}",
                hint="repair that model, or merge anyway with `allow_nonfinite=True`",
            )
        self._note(label, name)

    def merged(self, result: Tensor, block: MergeBlock) -> None:
        """Refuse or record a result that overflowed its dtype."""
        if not result.is_floating_point() or is_finite(result) or bool(result.isfinite().all()):
            return
        if not self._allow:
            raise NumericalError(
                f"the merged tensor {block.tensor} holds values that {result.dtype} cannot",
                hint="choose a wider dtype or out_dtype (bfloat16, float32), or smaller weights",
            )
        self._note("the merged model", block.tensor)

    def _note(self, whose: str, tensor: str) -> None:
        with self._lock:
            self.noted.setdefault(whose, {})[tensor] = None

    def note(self, noted: Mapping[str, Iterable[str]]) -> None:
        """Add the findings of another process."""
        for whose, tensors in noted.items():
            for tensor in tensors:
                self._note(whose, tensor)

    def notices(self) -> Iterator[str]:
        """Yield one notice per model for the tensors that `allow_nonfinite` accepted."""
        for whose, tensors in sorted(self.noted.items()):
            count = counted(len(tensors), "tensor holds", "tensors hold")
            yield f"{whose}: {count} NaN or infinity ({first_few(sorted(tensors), TENSORS_NAMED)})"
