"""Continuous batching: when a completion ends, the next prompt takes its slot in the batch.

transformers' caches write all rows of a batch at one position. In `SlotCache` every slot has its
own position. Whether a model supports this is decided from its config and then tried on a few
tokens.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from moemerge.config.text_settings import GenerationSettings
from moemerge.forward.compat import attention_implementation
from moemerge.lab.generation.drawing import draw, signed, uniform
from moemerge.lab.generation.engine import CompletionRequest
from moemerge.runtime.gpu import RecordedStep


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer, each of shape (slots, heads, columns, width)."""

    is_sliding = False

    def __init__(self, owner: SlotCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._owner = owner

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the tensors are allocated at once."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token of every slot at its position, and return the window in use."""
        assert self.keys is not None
        assert self.values is not None
        owner = self._owner
        self.keys[owner.rows, :, owner.positions] = key_states[:, :, 0]
        self.values[owner.rows, :, owner.positions] = value_states[:, :, 0]
        return self.keys[:, :, : owner.window], self.values[:, :, : owner.window]

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self._owner.window, 0

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self._owner.window

    def get_max_length(self) -> int:
        return self._owner.capacity

    def get_max_cache_shape(self) -> int:
        """The earlier name of `get_max_length`."""
        return self._owner.capacity


class SlotCache(Cache):
    """Slots for all layers, with the shapes of a first prefill."""

    def __init__(self, like: Cache, slots: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.window = capacity
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.rows = torch.arange(slots, device=device)
        layers = [self._empty(layer, slots) for layer in layers_of(like)]
        super().__init__(layers=layers)  # type: ignore[arg-type]

    def _empty(self, like: CacheLayerMixin, slots: int) -> SlotLayer:
        def room(tensor: Tensor | None) -> Tensor:
            assert tensor is not None
            _rows, heads, _columns, width = tensor.shape
            return tensor.new_zeros(slots, heads, self.capacity, width)

        return SlotLayer(self, room(like.keys), room(like.values))

    def adopt(self, prefill: Cache, rows: Tensor, slots: Tensor) -> None:
        """Copy the cache of a prefill: row `rows[i]` into slot `slots[i]`.

        Its padding is behind the end of a text and is overwritten before attention reads it.
        """
        for mine, other in zip(layers_of(self), layers_of(prefill), strict=True):
            for name in ("keys", "values"):
                cached: Tensor = getattr(other, name)
                getattr(mine, name)[slots, :, : cached.shape[2]] = cached[rows]

    def keep(self, slots: Tensor) -> None:
        """Drop all other slots."""
        self.positions = self.positions[slots]
        self.rows = torch.arange(len(slots), device=slots.device)
        for layer in layers_of(self):
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = layer.keys[slots], layer.values[slots]


def layers_of(cache: Cache) -> list[CacheLayerMixin]:
    """Return a cache's layers, all of which must hold only keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]


def bytes_per_token(cache: Cache) -> int:
    """Return the bytes that one token takes in the caches of all layers."""
    total = 0
    for layer in layers_of(cache):
        for tensor in (layer.keys, layer.values):
            assert tensor is not None
            total += tensor.shape[1] * tensor.shape[3] * tensor.element_size()
    return total


# The attention window is rounded up to a multiple of this: each window is one CUDA graph, and equal
# shapes round alike.
WINDOWS: Final = {"cuda": 128, "cpu": 32}
PREFILL_TOKENS: Final = {"cuda": 16384, "cpu": 2048}
# Free slots are filled once this share is free, because a prefill makes all others wait.
REFILL_SHARE: Final = 1 / 8
# Number of tokens between two searches for stop texts. Text after a stop text is cut off.
STOPS_EVERY: Final = 8


@dataclass
class Running:
    """A completion in progress."""

    wanted: CompletionRequest
    limit: int  # the most tokens
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """A finished completion as tokens, without the end token."""

    wanted: CompletionRequest
    tokens: list[int]
    cut: bool  # at the most tokens


class ContinuousBatch:
    """Generate completions of one model. Rows are independent of their neighbours."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: GenerationSettings,
        *,
        ends: frozenset[int],
        slots: int,
        capacity: int,
        stopped: Callable[[list[int]], bool],
    ) -> None:
        self._model = model
        self._settings = settings
        self._ends = ends
        self._capacity = capacity
        self._stopped = stopped
        self._device = model.device
        self._running: list[Running | None] = [None] * slots
        self._tokens = torch.zeros(slots, 1, dtype=torch.int64, device=self._device)
        self._streams = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._steps = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._cache: SlotCache | None = None
        self._recorded: dict[int, RecordedStep] = {}
        self._recordable = True
        # The logits of prompts are not used.
        known = inspect.signature(model.forward).parameters
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    @torch.inference_mode()
    def run(self, wanted: Sequence[CompletionRequest]) -> Iterator[Finished]:
        """Yield completions as they end. They start in the order given, the longest first."""
        waiting = deque(wanted)
        while waiting or any(self._running):
            free = [slot for slot, text in enumerate(self._running) if text is None]
            enough = len(free) >= max(1, REFILL_SHARE * len(self._running))
            if waiting and (enough or len(free) >= len(waiting)):
                taken = [waiting.popleft() for _ in range(min(len(free), len(waiting)))]
                self._begin(taken, free)
                continue
            if not waiting:
                self._shrink(free)
            yield from self._step()

    # --- prompts ---

    def _begin(self, taken: Sequence[CompletionRequest], free: Sequence[int]) -> None:
        """Fill slots with prompts. A prompt is computed once for all its samples.

        The next step processes their last tokens and samples the first new tokens.
        """
        slots = iter(free)
        for group in _groups(taken, PREFILL_TOKENS[self._device.type]):
            prompts = list(dict.fromkeys(w.tokens for w in group))
            cache = prefill(self._model, prompts, self._last_only)
            places = {tokens: row for row, tokens in enumerate(prompts)}
            rows = self._tensor([places[w.tokens] for w in group])
            chosen = [next(slots) for _ in group]
            index = self._tensor(chosen)
            if self._cache is None:
                self._cache = SlotCache(cache, len(self._running), self._capacity, self._device)
            self._cache.adopt(cache, rows, index)
            self._cache.positions[index] = self._tensor([len(w.tokens) - 1 for w in group])
            self._tokens[index, 0] = self._tensor([w.tokens[-1] for w in group])
            seeds = [signed(w.stream(self._settings.seed)) for w in group]
            self._streams[index] = self._tensor(seeds)
            self._steps[index] = 0
            for w, slot in zip(group, chosen, strict=True):
                limit = min(self._settings.max_new_tokens, self._capacity - len(w.tokens))
                self._running[slot] = Running(w, limit)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    # --- steps ---

    def _step(self) -> Iterator[Finished]:
        cache = self._cache
        assert cache is not None
        lengths = [len(r.wanted.tokens) + len(r.tokens) for r in self._running if r is not None]
        size = WINDOWS[self._device.type]
        cache.window = min(self._capacity, -(-max(lengths) // size) * size)
        self._advance_recorded(cache.window)
        tokens = self._tokens[:, 0].tolist()
        for slot, running in enumerate(self._running):
            if running is not None:
                yield from self._take(slot, tokens[slot])

    def _advance_recorded(self, window: int) -> None:
        if self._recordable:
            step = self._recorded.setdefault(window, RecordedStep(self._advance, self._device))
            try:
                step()
                return
            except RuntimeError:
                # A step that reads values back cannot be captured. The failed attempt has changed
                # nothing, so the eager step repeats it, or fails with the same error.
                self._recordable = False
                self._recorded.clear()
        self._advance()

    def _advance(self) -> None:
        """Sample one token for every slot. Reads nothing back, so a CUDA graph can capture it."""
        cache = self._cache
        assert cache is not None
        logits = next_logits(self._model, self._tokens, cache)
        numbers = uniform(self._streams, self._steps)
        self._tokens.copy_(draw(logits, numbers, self._settings)[:, None])
        self._steps += 1
        # Empty slots advance too, and must not run over their end.
        cache.positions.add_(1).clamp_(max=self._capacity - 1)

    def _take(self, slot: int, token: int) -> Iterator[Finished]:
        """Add a token to the completion in a slot, and yield the completion if that ends it."""
        running = self._running[slot]
        assert running is not None
        ended = token in self._ends
        if not ended:
            running.tokens.append(token)
        full = len(running.tokens) >= running.limit
        if not ended and len(running.tokens) % STOPS_EVERY == 0:
            ended = self._stopped(running.tokens)
        if ended or full:
            self._running[slot] = None
            yield Finished(running.wanted, running.tokens, cut=not ended)

    def _shrink(self, free: Sequence[int]) -> None:
        """Drop finished slots once they are half of all: on a CPU every row costs time."""
        if self._device.type != "cpu" or len(free) * 2 < len(self._running):
            return
        kept = [slot for slot, text in enumerate(self._running) if text is not None]
        if not kept or self._cache is None:
            return
        index = torch.tensor(kept)
        self._cache.keep(index)
        self._tokens, self._streams = self._tokens[index], self._streams[index]
        self._steps = self._steps[index]
        self._running = [self._running[slot] for slot in kept]


def next_logits(model: PreTrainedModel, tokens: Tensor, cache: SlotCache) -> Tensor:
    """Process one token per slot, (slots, 1), and return the logits after it."""
    columns = torch.arange(cache.window, device=tokens.device)
    seen = columns <= cache.positions[:, None]  # (slots, window)
    logits: Tensor = model(
        input_ids=tokens,
        attention_mask=seen[:, None, None],
        position_ids=cache.positions[:, None],
        past_key_values=cache,
        use_cache=True,
    ).logits[:, -1]
    return logits


def prefill(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], options: Mapping[str, Any]
) -> DynamicCache:
    """Return the cache of prompts, padded on the right, without their last tokens.

    Texts start in the first column, so causal attention needs no mask, and the length of its
    neighbours does not change a text's values.
    """
    cache = DynamicCache(config=model.config)
    ids = without_last(prompts, model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
    return cache


def without_last(texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return texts without their last tokens, padded on the right: no text attends to padding."""
    longest = max(2, *map(len, texts)) - 1
    rows = [[*text[:-1], *[0] * (longest - len(text) + 1)] for text in texts]
    return torch.tensor(rows, device=device)


def _groups(taken: Sequence[CompletionRequest], budget: int) -> Iterator[list[CompletionRequest]]:
    """Yield neighbours whose distinct prompts, padded, stay within the token budget."""
    group: list[CompletionRequest] = []
    longest, distinct = 0, 0
    for wanted in taken:
        new = not group or wanted.tokens != group[-1].tokens
        length = max(longest, len(wanted.tokens))
        if group and new and length * (distinct + 1) > budget:
            yield group
            group, length, distinct = [], len(wanted.tokens), 0
        group.append(wanted)
        longest, distinct = length, distinct + new
    if group:
        yield group


# --- whether a model can --------------------------------------------------------------------------

# Relative error of the last logits. Rounding in float32 stays below 1e-4; in bfloat16 a token may
# be routed to other experts. A cache that is read wrongly has an error of about 1.
TOLERANCE: Final = {torch.float32: 1e-2, torch.float64: 1e-2}
ROUGH: Final = 0.3
FULL: Final = "full_attention"
PROMPTS: Final = ((3, 5, 7, 4, 6), (5, 3), (4,))
CONTINUED: Final = (4, 7, 3)


def why_not(model: PreTrainedModel) -> str | None:
    """Return why texts of different lengths cannot share a batch, or None if they can."""
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {FULL}
    if kinds:
        return f"layers of {', '.join(sorted(kinds))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "a sliding window"
    if (attention := attention_implementation(config)) != "sdpa":
        return f"{attention} attention"
    try:
        error = _error(model)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as problem:
        return f"a custom cache ({type(problem).__name__})"
    bound = TOLERANCE.get(model.dtype, ROUGH)
    return None if error <= bound else f"a custom cache (logits differ by {error:.2g})"


@torch.inference_mode()
def _error(model: PreTrainedModel) -> float:
    """Return the relative error of logits after a few steps from slots, against full texts."""
    device = model.device
    cache = prefill(model, PROMPTS, {})
    if len(layers_of(cache)) != len(cache.layers):
        raise TypeError("layers that hold more than keys and values")
    texts = [(*prompt, *CONTINUED) for prompt in PROMPTS]
    slots = SlotCache(cache, len(texts), max(map(len, texts)), device)
    rows = torch.arange(len(texts), device=device)
    slots.adopt(cache, rows, rows)
    slots.positions.copy_(torch.tensor([len(p) - 1 for p in PROMPTS]))
    for at in range(-1, len(CONTINUED)):
        tokens = [text[len(p) + at] for text, p in zip(texts, PROMPTS, strict=True)]
        logits = next_logits(model, torch.tensor(tokens, device=device)[:, None], slots)
        slots.positions += 1
    errors = []
    for row, text in enumerate(texts):
        ids = torch.tensor([text], device=device)
        whole = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        error = (logits[row].float() - whole).norm() / whole.norm().clamp(min=1e-30)
        errors.append(float(error))
    return max(errors)
