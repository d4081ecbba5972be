"""A model's head without its body: hidden states are given, and the model's own code goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from moemerge.errors import ArchitectureError
from moemerge.features.taps import LinearTap


@contextlib.contextmanager
def body_gives(model: PreTrainedModel, owner: str, hidden: Tensor) -> Iterator[None]:
    """Inside, the body (which holds `owner`) is passed over: the head gets `hidden` at once."""
    given: Any = MoeModelOutputWithPast(last_hidden_state=hidden)  # type: ignore[arg-type]
    with _forward_of(model, owner.split(".")[0], lambda *args, **kwargs: given):
        yield


class _Reached(BaseException):
    """Ends a forward at the head. No Exception, so that no model code can swallow it."""


def head_input(model: PreTrainedModel, owner: str, head: LinearTap, hidden: Tensor) -> Tensor:
    """What the head's matrix reads, which some families scale first; its weights may be away."""
    seen: list[Tensor] = []

    def reached(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(x)
        raise _Reached

    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    with (
        torch.no_grad(),
        contextlib.suppress(_Reached),
        body_gives(model, owner, hidden),
        _forward_of(model, head.path, reached),
    ):
        try:
            model(input_ids=ids, use_cache=False)
        except (RuntimeError, AttributeError, TypeError, ValueError, KeyError) as error:
            raise ArchitectureError(
                f"the head of {type(model).__name__} does not run by itself: "
                f"{type(error).__name__}: {error}"
            ) from error
    if len(seen) != 1 or seen[0].shape != hidden.shape:
        raise ArchitectureError(f"{head.path} does not read the final hidden states")
    return seen[0]


@contextlib.contextmanager
def _forward_of(model: PreTrainedModel, path: str, forward: Any) -> Iterator[None]:
    module: Any = model.get_submodule(path)
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
