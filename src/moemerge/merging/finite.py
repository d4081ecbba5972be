"""NaN and infinity: refused by the tensor's name, or noted where they are allowed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moemerge.errors import NumericalError
from moemerge.merging.plan import Block, MergePlan, UnitInput

if TYPE_CHECKING:
    from torch import Tensor


SHOWN = 3  # tensors named in one notice


def is_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN or infinity; False also where huge values overflow their sum."""
    # One pass at memory speed: a finite sum has only finite terms.
    return math.isfinite(tensor.sum().item())


class FiniteCheck:
    """Looks at all that a merge reads and writes. Used by many threads at once."""

    def __init__(self, plan: MergePlan, *, allow: bool) -> None:
        self._plan = plan
        self._allow = allow
        self._noted: dict[str, dict[str, None]] = {}  # whose -> tensors that are not finite
        self._lock = threading.Lock()

    def read(self, tensor: Tensor, source: UnitInput) -> None:
        """Refuse or note an input tensor (or a part of it) that is not finite."""
        if not tensor.is_floating_point() or is_finite(tensor):
            return
        bad = int((~tensor.isfinite()).sum())
        if not bad:
            return
        model = self._plan.models[source.model]
        if not self._allow:
            raise NumericalError(
                f"{model.label}: tensor {source.tensor} holds {bad} non-finite values "
                f"(NaN or infinity) among {tensor.numel()}",
                hint="repair that model, or merge anyway with --allow-nonfinite",
            )
        self._note(model.label, source.tensor)

    def is_noted(self, source: UnitInput) -> bool:
        return source.tensor in self._noted.get(self._plan.models[source.model].label, ())

    def merged(self, result: Tensor, block: Block) -> None:
        """Refuse or note a result that is not finite: of finite inputs, it has outgrown its
        dtype."""
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
            self._noted.setdefault(whose, {})[tensor] = None

    def notices(self) -> Iterator[str]:
        """What was let through."""
        for whose, tensors in sorted(self._noted.items()):
            shown = ", ".join(sorted(tensors)[:SHOWN])
            more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
            count = "1 tensor holds" if len(tensors) == 1 else f"{len(tensors)} tensors hold"
            yield f"{whose}: {count} NaN or infinity ({shown}{more})"
