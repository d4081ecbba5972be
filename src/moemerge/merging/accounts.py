"""A ledger of input tensors: what becomes of each, and that none is forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moemerge.merging.plan import Account, Fate, InputModel


class Ledger:
    """Filled while the plan is made; `complete` then gives one line for every input tensor."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str], Account] = {}

    def record(self, model: str, tensor: str, fate: Fate, reason: str = "") -> None:
        """A use outweighs an earlier dropping: a stack may be used in part."""
        known = self._accounts.get((model, tensor))
        if known is None or known.fate is Fate.DROPPED:
            self._accounts[model, tensor] = Account(model, tensor, fate, reason)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._accounts

    def complete(self, models: Mapping[str, InputModel]) -> Iterator[Account]:
        for name, model in models.items():
            for tensor in model.checkpoint.tensors:
                known = self._accounts.get((name, tensor))
                yield known or Account(name, tensor, Fate.DROPPED, _unused(model, tensor))


def _unused(model: InputModel, tensor: str) -> str:
    layer = model.architecture.layer_of(tensor)
    return f"layer {layer} is in no slice" if layer is not None else "outside every slice"
