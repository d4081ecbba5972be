"""The model that learns.

An update of 1e-4 of a weight is lost if it is added in bfloat16. AdamW therefore works on float32
copies, and the model gets them rounded after every step. Adafactor rounds at random instead, and
needs no copies. Adapters (LoRA) are float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from moemerge.errors import NumericalError
from moemerge.families.opened import OpenModel
from moemerge.forward.fused import fuse
from moemerge.forward.routers import anatomy
from moemerge.forward.trainable import TrainedLayout, load_trainable
from moemerge.repairs.distilling.lora import Adapters
from moemerge.repairs.distilling.optimisers import OptimiserName
from moemerge.runtime.ranks import SINGLE, Ranks, gathered, own_shard

CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class StudentOptions:
    """How a student is loaded."""

    optimiser: OptimiserName
    recompute: bool  # activations, in the backward pass
    lora: int | None  # rank of the adapters; None: the weights themselves are trained
    seed: int


def needs_copies(optimiser: OptimiserName, dtype: torch.dtype) -> bool:
    """Return whether the optimiser works on float32 copies of weights of this dtype."""
    return dtype.itemsize < 4 and (optimiser, dtype) != ("adafactor", torch.bfloat16)


class Student:
    """A model in memory with some trainable parameters.

    If several ranks have their own devices, each holds a share of the model's weights (FSDP), of
    their gradients and of the optimiser's state. Adapters are whole in every rank.
    """

    def __init__(
        self,
        opened: OpenModel,
        layout: TrainedLayout,
        device: torch.device,
        dtype: torch.dtype,
        *,
        options: StudentOptions,
        ranks: Ranks = SINGLE,
    ) -> None:
        self.device = device
        self.ranks = ranks
        rank = options.lora
        self._stored = layout.stored_dtypes
        sharded = ranks.can_shard(device)
        self.model: Any = load_trainable(
            opened,
            layout,
            dtype,
            lora=rank is not None,
            device=device,
            shard=partial(ranks.shard, device=device) if sharded else None,
        )
        fuse(self.model, device, dtype)
        if options.recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._adapters: Adapters | None = None
        self.trained: dict[str, Tensor]
        if rank is None:
            self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        else:
            layers = anatomy(self.model).layers
            generator = torch.Generator(device).manual_seed(options.seed)
            self._adapters = Adapters(self.model, layers, layout.shapes, rank, generator)
            self.trained = self._adapters.parameters
        # FSDP takes the mean of gradients over ranks; without it they are summed.
        self.shares_weights = sharded and rank is None
        self._gathers = sharded
        # What the optimiser updates, by name: trained parameters (this rank's share of them), or
        # float32 copies.
        copied = needs_copies(options.optimiser, dtype)
        self.masters: dict[str, Tensor] = {}
        for name, value in self.trained.items():
            own = own_shard(value)
            if copied and own.dtype != torch.float32:
                own = own.detach().float().requires_grad_()
            self.masters[name] = own

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the next-token logits (rows, length, vocabulary) of rows padded on the right.

        Attention is causal, so padding on the right needs no mask: no token sees it.
        """
        out: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return out

    def gradients(self) -> list[Tensor]:
        """Return the gradients that ranks must add up, zeros if no token reached a parameter."""
        if self.shares_weights:  # FSDP has added them up
            return []
        for value in self.trained.values():
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        return [value.grad for value in self.trained.values() if value.grad is not None]

    def update(self, optimiser: torch.optim.Optimizer, clip: float) -> None:
        """Take one optimiser step with clipped gradients."""
        for name, value in self.trained.items():
            master = self.masters[name]
            if master is not value:
                gradient = torch.zeros_like(master) if value.grad is None else own_shard(value.grad)
                master.grad, value.grad = gradient.to(master.dtype), None
        masters = list(self.masters.values())
        total = torch.nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None])
        if self.shares_weights:
            squares = total.double().square()
            self.ranks.all_reduce(squares)
            total = squares.sqrt().to(total.dtype)
        norm = float(total)
        if not math.isfinite(norm):
            raise NumericalError(f"the gradient's norm is {norm}", hint="lower `learning_rate`")
        torch.nn.utils.clip_grads_with_norm_(masters, clip, total)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self._round_masters()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set what is optimised to `values`."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(values[name])
        self._round_masters()

    def snapshot(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Return a copy of what is optimised, on a device (default: the host)."""
        return {
            name: value.detach().to(device or CPU, copy=True)
            for name, value in self.masters.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return every trained tensor with its last value; adapters are merged.

        It ends the training. Every rank must call it if the model is distributed. Rank 0 then gets
        the tensors on the host, the others nothing.
        """
        if self._gathers:
            return self._gathered()
        if self._adapters is not None:
            self._adapters.merge()
            state: dict[str, Tensor] = self.model.state_dict()
            return state
        return {**self.model.state_dict(), **{n: v.detach() for n, v in self.masters.items()}}

    @torch.no_grad()
    def _gathered(self) -> dict[str, Tensor]:
        adapted = self._adapters.factors if self._adapters is not None else {}
        state = {}
        for name, value in self.model.named_parameters(remove_duplicate=False):
            whole = gathered(value)
            if self._adapters is not None and name in adapted:
                whole = self._adapters.adapted(name, whole)
            if self.ranks.leads:
                state[name] = whole.cpu()
        return state

    def _round_masters(self) -> None:
        with torch.no_grad():
            for name, value in self.trained.items():
                own = own_shard(value)
                if self.masters[name].dtype != own.dtype:
                    own.copy_(self.masters[name])

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the model without gradients, with the weights as they will be written: rounded to
        the dtypes of the checkpoint, which may be narrower than the forward dtype."""
        exact: list[tuple[Tensor, Tensor]] = []
        self.model.eval()
        with torch.no_grad():
            if self._adapters is not None:
                self._adapters.rounded = self._stored
            else:
                for name, value in self.trained.items():
                    own, stored = own_shard(value), self._stored.get(name, value.dtype)
                    if stored.itemsize < own.dtype.itemsize:
                        exact.append((own, own.clone()))
                        own.copy_(own.to(stored))
            try:
                yield
            finally:
                for own, kept in exact:
                    own.copy_(kept)
                if self._adapters is not None:
                    self._adapters.rounded = {}
                self.model.train()
