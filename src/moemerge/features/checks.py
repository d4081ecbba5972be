"""What is looked at on the way: tokens the model knows, hidden states that are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moemerge.errors import ArchitectureError, DataError, MoeMergeError, ResourceError
from moemerge.features.memory import MemoryEstimate
from moemerge.features.routers import Anatomy
from moemerge.text.batches import Batch


def check_tokens(model: PreTrainedModel, batches: Sequence[Batch], label: str) -> None:
    """An unknown token would stop an accelerator with a message that helps nobody."""
    if not batches:
        raise DataError("no batch of calibration text given")
    embedding: Any = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    largest = max(int(batch.input_ids.max()) for batch in batches)
    if rows is not None and largest >= rows:
        raise DataError(
            f"the text holds token {largest}, but {label} knows {rows} tokens",
            hint="text must be tokenized with the model's own tokenizer",
        )


def real_rows(batch: Batch, device: torch.device) -> Tensor | None:
    """Places of real tokens in the flattened batch; None where nothing is padded."""
    if not batch.padded:
        return None
    return batch.mask.reshape(-1).nonzero().squeeze(1).to(device)


def finite(value: Tensor, rows: Tensor | None) -> Tensor:
    """Whether all real tokens are finite: a flag that stays on the device, so nothing waits."""
    if not value.is_floating_point() or value.numel() == 0:
        return torch.tensor(True, device=value.device)
    if rows is not None:
        tokens = value if value.dim() == 2 else value.flatten(0, 1)  # (rows * length, ...)
        value = tokens.index_select(0, rows)
    low, high = torch.aminmax(value.detach())
    return torch.isfinite(low) & torch.isfinite(high)


def no_router(anatomy: Anatomy, label: str) -> ArchitectureError:
    have = sorted({router.layer for router in anatomy.routers})
    return ArchitectureError(
        f"{label}: no router to stop at", hint=f"layers with a router: {have or 'none'}"
    )


def raise_forward_error(error: BaseException, where: str, memory: MemoryEstimate) -> NoReturn:
    """What a model's forward raised, as an error of ours; ours and interrupts as they are."""
    if isinstance(error, MoeMergeError) or not isinstance(error, Exception):
        raise error
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        raise ResourceError(
            f"{where}: out of memory on {memory.device} ({memory.describe()})",
            hint="use smaller batches, --offload cpu or disk, or fewer tokens",
        ) from error
    raise ArchitectureError(
        f"{where}: the model's forward failed: {type(error).__name__}: {error}"
    ) from error
