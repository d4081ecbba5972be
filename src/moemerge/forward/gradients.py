"""Run a layer or the head again with gradients, and record inputs and output gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from moemerge.errors import ArchitectureError
from moemerge.forward.input_hooks import InputHook, LinearHook, body_gives
from moemerge.text.batches import Batch


@dataclass(eq=False)
class ModuleCall:
    """One call of a hooked module."""

    hook: InputHook
    args: tuple[Any, ...]  # unchanged; the first is x
    delta: Tensor | None = None  # d loss / d output, after the backward pass


@dataclass
class Recorder:
    """Records calls of hooked modules inside the block, and their gradients afterwards."""

    model: PreTrainedModel
    hooks: Iterable[InputHook]
    calls: list[ModuleCall] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)
    _modes: list[Any] = field(default_factory=list)

    def __enter__(self) -> Recorder:
        for hook in self.hooks:
            module = self.model.get_submodule(hook.path)
            if isinstance(hook, LinearHook) and type(module).forward is not nn.Linear.forward:
                self._handles.append(module.register_forward_pre_hook(self._enter_router(hook)))
                self._handles.append(module.register_forward_hook(self._leave_router))
            else:
                self._handles.append(
                    module.register_forward_hook(self._listener(hook), with_kwargs=True)
                )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._modes:
            self._modes.pop().__exit__(None, None, None)

    def _listener(self, hook: InputHook) -> Callable[..., None]:
        def listen(module: nn.Module, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
            given = (*args, *kwargs.values())
            self._expect(hook, given, out[0] if isinstance(out, tuple) else out)

        return listen

    def _expect(self, hook: InputHook, given: tuple[Any, ...], out: Tensor) -> None:
        call = ModuleCall(hook, tuple(v.detach() if isinstance(v, Tensor) else v for v in given))
        self.calls.append(call)

        def back(gradient: Tensor) -> None:
            call.delta = gradient.detach()

        if out.requires_grad:
            out.register_hook(back)  # type: ignore[no-untyped-call]

    # A router returns more than its logits, so the product inside it is recorded.

    def _enter_router(self, hook: LinearHook) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            mode: Any = _FirstProduct(hook.shape, lambda x, out: self._expect(hook, (x,), out))
            mode.__enter__()
            self._modes.append(mode)

        return enter

    def _leave_router(self, module: nn.Module, args: Any, out: Any) -> None:
        self._modes.pop().__exit__(None, None, None)


class _FirstProduct(TorchFunctionMode):
    """Calls `tell` at the first product with a matrix of the given shape."""

    def __init__(self, shape: tuple[int, int], tell: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._shape = shape
        self._tell: Callable[[Tensor, Tensor], None] | None = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._tell is not None and func in _PRODUCTS and len(args) > 1:
            x, weight = args[0], args[1]
            shape = weight.shape if func is nn.functional.linear else weight.shape[::-1]
            if tuple(shape) == self._shape:
                tell, self._tell = self._tell, None
                tell(x, out)
        return out


_PRODUCTS = (
    nn.functional.linear,
    torch.matmul,
    torch.mm,
    Tensor.matmul,
    Tensor.mm,
    Tensor.__matmul__,
)


def run_back(
    model: PreTrainedModel,
    path: str,
    hidden: Tensor,
    call: Callable[[nn.Module, Tensor], Any],
    gradient: Tensor,
    hooks: Sequence[InputHook],
) -> tuple[Tensor, Tensor, list[ModuleCall]]:
    """Run a layer on `hidden` again and backpropagate `gradient` through it.

    Return its output, the gradient of its input, and the calls of its hooked modules.
    """
    with torch.enable_grad(), Recorder(model, hooks) as recorder:
        x = hidden.detach().requires_grad_(True)
        result = call(model.get_submodule(path), x)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        if out.shape != gradient.shape:
            raise ArchitectureError(
                f"{path} gives {list(out.shape)}, expected {list(gradient.shape)}: its output is "
                "not the next layer's input, so gradients cannot be sent back layer by layer"
            )
    (back,) = torch.autograd.grad(out, x, gradient)
    return out.detach(), back, recorder.calls


def head_back(
    model: PreTrainedModel,
    owner: str,
    tail: str,
    batch: Batch,
    hidden: Tensor,
    head: LinearHook | None,
) -> tuple[Tensor, list[ModuleCall]]:
    """Backpropagate the loss of every sequence to the last layer's output.

    A sequence's loss is -Σ_t log p(token t + 1 | tokens up to t). `tail` is the norm after the last
    layer. Rows are independent, so the gradient of the sum contains each row's own gradient.
    """
    hooks = () if head is None else (head,)
    with torch.enable_grad(), Recorder(model, hooks) as recorder:
        x = hidden.detach().requires_grad_(True)
        last = model.get_submodule(tail)(x)
        with body_gives(model, owner, last):
            ids = batch.input_ids.to(hidden.device)
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
        labels = ids[:, 1:].masked_fill(~batch.mask[:, 1:].to(ids.device), -100)
        flat = logits[:, :-1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        loss = nn.functional.cross_entropy(
            flat, labels.flatten(), ignore_index=-100, reduction="sum"
        )
    (back,) = torch.autograd.grad(loss, x)
    return back, recorder.calls


def expert_deltas(view: Any, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return d loss / d pre, the down projection's input, and d loss / d down of one expert.

    `gradient` is d loss / d output of the expert, including the routing weight.
    """
    with torch.enable_grad():
        pre = view.pre(x).detach().requires_grad_(True)
        mid = view.mid(pre)
        down = view.down(mid)
        out = view.finish(down)
    of_down, of_pre = torch.autograd.grad(out, (down, pre), gradient.to(out.dtype))
    return of_pre, mid.detach(), of_down
