"""What methods for linear layers share: who changed a weight, and all other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.architectures.roles import Role
from moemerge.merging.method import ModelTensor, UnitInfo, param
from moemerge.merging.methods._arithmetic import weighted_sum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


# Matrices that are no linear layers: rows are looked up or scaled, not multiplied with inputs.
NOT_LINEAR = frozenset({Role.NORM, Role.EMBEDDING, Role.HEAD})


@dataclass(frozen=True)
class OthersOptions:
    """What becomes of tensors that are no linear layers."""

    others: str = param(
        "average",
        choices=("average", "base"),
        help="norms, embeddings, heads and biases: average of the models, or the base's own",
    )


@dataclass(frozen=True)
class SpectralOptions(OthersOptions):
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")


def is_linear(base: Tensor, unit: UnitInfo) -> bool:
    return base.dim() == 2 and base.numel() > 0 and unit.role not in NOT_LINEAR


def merge_others(inputs: Sequence[ModelTensor], base: Tensor, options: OthersOptions) -> Tensor:
    """Norms, embeddings, heads and biases."""
    if options.others == "base":
        return base.clone(memory_format=torch.contiguous_format)
    return weighted_sum([i.tensor for i in inputs], [1 / len(inputs)] * len(inputs))


def changes(inputs: Sequence[ModelTensor], base: Tensor) -> list[Tensor]:
    """The task vectors of the models that changed this weight.

    Experts that no token reached in fine-tuning keep the base's weights, exactly or rounded to the
    dtype that the model is stored in. Methods that normalise would take that rounding for a skill.
    """
    return [i.tensor - base for i in inputs if not _is_unchanged(i.tensor, base)]


def _is_unchanged(tensor: Tensor, base: Tensor) -> bool:
    """Equal, or one is the other rounded to a narrower dtype."""
    if torch.equal(tensor, base):
        return True
    for dtype in (torch.bfloat16, torch.float16):
        a, b = tensor.to(dtype), base.to(dtype)
        if not torch.equal(a, b):
            continue
        if torch.equal(a.to(tensor.dtype), tensor) or torch.equal(b.to(base.dtype), base):
            return True
    return False
