"""The model that learns.

An update of 1e-4 of a weight is lost if it is added in bfloat16. AdamW therefore works on float32
copies, and the model gets them rounded after every step. Adafactor rounds at random instead, and
needs no copies. Adapters (LoRA) are float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moemerge.errors import NumericalError
from moemerge.families.opened import OpenModel
from moemerge.forward.fused import fuse
from moemerge.forward.routers import anatomy
from moemerge.forward.trainable import TrainedLayout, load_trainable
from moemerge.repairs.adafactor import OptimiserName
from moemerge.runtime.ranks import SINGLE, Ranks, gathered, own_shard

CPU: Final = torch.device("cpu")


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
        optimiser: OptimiserName,
        recompute: bool,
        lora: int | None,
        seed: int,
        ranks: Ranks = SINGLE,
    ) -> None:
        """Load the model. `recompute` recomputes activations in the backward pass, and `lora` is
        the rank of the adapters; without it, the weights themselves are trained."""
        self.device = device
        self.ranks = ranks
        self._stored = layout.stored_dtypes
        sharded = ranks.can_shard(device)
        self.model: Any = load_trainable(
            opened,
            layout,
            dtype,
            lora=lora is not None,
            device=device,
            shard=partial(ranks.shard, device=device) if sharded else None,
        )
        fuse(self.model, device, dtype)
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._adapters: Adapters | None = None
        self.trained: dict[str, Tensor]
        if lora is None:
            self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        else:
            layers = anatomy(self.model).layers
            generator = torch.Generator(device).manual_seed(seed)
            self._adapters = Adapters(self.model, layers, layout.shapes, lora, generator)
            self.trained = self._adapters.parameters
        # FSDP takes the mean of gradients over ranks; without it they are summed.
        self.shares_weights = sharded and lora is None
        self._gathers = sharded
        # What the optimiser updates, by name: trained parameters (this rank's share of them), or
        # float32 copies.
        copied = needs_copies(optimiser, dtype)
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


# --- low-rank adapters: while a layer runs, each of its matrices W is replaced by W + 2 B A -------
# The sum is computed for a whole layer and rounded to the forward dtype. So no module needs to know
# of adapters, stacks of experts get one pair per expert, and the merged weights are exactly those
# that were evaluated. Only the small factors A and B have gradients and optimiser states.

SCALE: Final = 2.0  # of B A, as in `tune`


def factor_shapes(shape: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of B and A for a matrix, or for a stack of them."""
    *stack, rows, columns = shape
    rank = min(rank, rows, columns)
    return (*stack, rows, rank), (*stack, rank, columns)


def adapter_numel(shapes: Mapping[str, Sequence[int]], rank: int) -> int:
    """Return the number of parameters of adapters on matrices of these shapes."""
    return sum(math.prod(one) for shape in shapes.values() for one in factor_shapes(shape, rank))


class Adapters:
    """The adapters of a model's layers."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        shapes: Mapping[str, Sequence[int]],
        rank: int,
        generator: torch.Generator,
    ) -> None:
        self._model = model
        # While the model is evaluated: the dtypes of the written weights, by name.
        self.rounded: Mapping[str, torch.dtype] = {}
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        device = generator.device
        for name, shape in sorted(shapes.items()):
            up, down = factor_shapes(shape, rank)
            spread = torch.randn(down, generator=generator, device=device) * shape[-1] ** -0.5
            self.factors[name] = torch.zeros(up, device=device).requires_grad_(), spread
            spread.requires_grad_()
        for path in layers:
            self._wrap(path)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the factors by name."""
        return {
            f"{name}.lora_{part}": factor
            for name, pair in self.factors.items()
            for part, factor in zip("BA", pair, strict=True)
        }

    def adapted(self, name: str, weight: Tensor | None = None) -> Tensor:
        """Return W + 2 B A, rounded to the dtype of W; W is the model's own by default."""
        weight = self._model.get_parameter(name) if weight is None else weight
        up, down = (factor.to(weight.dtype) for factor in self.factors[name])
        add = torch.addmm if weight.dim() == 2 else torch.baddbmm
        whole = add(weight, up, down, alpha=SCALE)
        return whole.to(self.rounded.get(name, whole.dtype)).to(whole.dtype)

    def merge(self) -> None:
        """Write the adapted matrices into the model."""
        with torch.no_grad():
            for name in self.factors:
                self._model.get_parameter(name).copy_(self.adapted(name))

    def _wrap(self, path: str) -> None:
        """Run a layer with its adapted matrices."""
        layer: Any = self._model.get_submodule(path)
        names = [name for name in self.factors if name.startswith(f"{path}.")]
        run = _Forward(layer)

        def forward(*args: Any, **keywords: Any) -> Any:
            matrices = {f"layer.{n[len(path) + 1 :]}": self.adapted(n) for n in names}
            return functional_call(run, matrices, args, keywords)

        layer.forward = forward


class _Forward(nn.Module):
    """A module's own forward pass under another name, so that it can be replaced by one that
    calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._run = layer.forward

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self._run(*args, **keywords)
