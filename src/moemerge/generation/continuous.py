"""Continuous batching: a slot that a finished completion leaves is taken by the next prompt.

Whether a model can go on from slots is asked of its config, then tried on a few tokens.
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

from moemerge.config.generation import GenerationSettings
from moemerge.features.compat import attention_implementation
from moemerge.generation.drawing import draw, signed, uniform
from moemerge.generation.engine import Finish, Wanted
from moemerge.generation.slots import SlotCache, layers_of
from moemerge.runtime.gpu import RecordedStep

# Columns that attention looks at are rounded up to these: a window is one recorded graph, and
# equal shapes round alike.
WINDOWS: Final = {"cuda": 128, "cpu": 32}
PREFILL_TOKENS: Final = {"cuda": 16384, "cpu": 2048}
# Free slots are filled when this share of them is free: a prefill makes all others wait.
REFILL_SHARE: Final = 1 / 8
# Stop texts are looked for every so many tokens; what is written past one is cut off.
STOPS_EVERY: Final = 8


@dataclass
class Running:
    """A completion on its way."""

    wanted: Wanted
    limit: int  # tokens at which it is cut
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """One that is done, as tokens; the end token is not among them."""

    wanted: Wanted
    tokens: list[int]
    finish: Finish


class ContinuousBatch:
    """Completions of one model. Rows do not see each other, so neighbours change nothing."""

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
        # Nobody reads the logits of prompts.
        known = inspect.signature(model.forward).parameters
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    @torch.inference_mode()
    def run(self, wanted: Sequence[Wanted]) -> Iterator[Finished]:
        """All of them, as they are done. Texts of like length are begun together."""
        waiting = deque(sorted(wanted, key=lambda w: (-len(w.tokens), w.prompt, w.sample)))
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

    def _begin(self, taken: Sequence[Wanted], free: Sequence[int]) -> None:
        """Fill slots with prompts, each computed once however many samples it has.

        Their last tokens are left to the next step, which draws all first tokens as it draws all
        others.
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
                # A step that reads values back cannot be recorded. What failed has advanced
                # nothing yet, so the plain step does the same, or fails with the same words.
                self._recordable = False
                self._recorded.clear()
        self._advance()

    def _advance(self) -> None:
        """One token for every slot; reads nothing back, so that it can be recorded."""
        cache = self._cache
        assert cache is not None
        columns = torch.arange(cache.window, device=self._device)
        seen = columns <= cache.positions[:, None]  # (slots, window)
        logits = self._model(
            input_ids=self._tokens,
            attention_mask=seen[:, None, None],
            position_ids=cache.positions[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        self._tokens.copy_(self._draw(logits, self._streams, self._steps)[:, None])
        self._steps += 1
        # Empty slots go on as well, and must not run over their end.
        cache.positions.add_(1).clamp_(max=self._capacity - 1)

    def _draw(self, logits: Tensor, streams: Tensor, steps: Tensor) -> Tensor:
        s = self._settings
        return draw(
            logits,
            uniform(streams, steps),
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
        )

    def _take(self, slot: int, token: int) -> Iterator[Finished]:
        """Add a token to the completion in a slot, and see whether that ends it."""
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
            yield Finished(running.wanted, running.tokens, Finish.STOP if ended else Finish.LENGTH)

    def _shrink(self, free: Sequence[int]) -> None:
        """On a CPU every row costs, so once half of the slots are done for good, they go."""
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


def prefill(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], options: Mapping[str, Any]
) -> DynamicCache:
    """What a model caches of prompts, padded on the right, without their last tokens.

    Texts begin in the first column and see nothing of the padding behind them, so attention needs
    no mask, and a text's numbers do not depend on how long its neighbours are.
    """
    longest = max(2, *map(len, prompts)) - 1
    ids = [[*p[:-1], *[0] * (longest - len(p) + 1)] for p in prompts]
    cache = DynamicCache(config=model.config)
    model(
        input_ids=torch.tensor(ids, device=model.device),
        past_key_values=cache,
        use_cache=True,
        **options,
    )
    return cache


def _groups(taken: Sequence[Wanted], budget: int) -> Iterator[list[Wanted]]:
    """Neighbours whose distinct prompts, padded, stay within the budget of tokens."""
    group: list[Wanted] = []
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

# Relative error of the last logits. Rounding of float32 stays below 1e-4; in bfloat16 a token may
# choose other experts. A cache that is read wrongly errs by about 1.
TOLERANCE: Final = {torch.float32: 1e-2, torch.float64: 1e-2}
ROUGH: Final = 0.3
FULL: Final = "full_attention"
PROMPTS: Final = ((3, 5, 7, 4, 6), (5, 3), (4,))
CONTINUED: Final = (4, 7, 3)


def why_not(model: PreTrainedModel) -> str | None:
    """Why texts of unlike length cannot share a batch; None where they can."""
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
        return f"a cache of its own kind ({type(problem).__name__})"
    bound = TOLERANCE.get(model.dtype, ROUGH)
    return None if error <= bound else f"a cache of its own kind (logits differ by {error:.2g})"


@torch.inference_mode()
def _error(model: PreTrainedModel) -> float:
    """How far logits after a few steps from slots are from those of the whole texts."""
    device = model.device
    cache = prefill(model, PROMPTS, {})
    if len(layers_of(cache)) != len(cache.layers):
        raise TypeError("layers that hold more than keys and values")
    texts = [(*prompt, *CONTINUED) for prompt in PROMPTS]
    slots = SlotCache(cache, len(texts), max(map(len, texts)), device)
    rows = torch.arange(len(texts), device=device)
    slots.adopt(cache, rows, rows)
    slots.positions.copy_(torch.tensor([len(p) - 1 for p in PROMPTS]))
    columns = torch.arange(slots.capacity, device=device)
    for at in range(-1, len(CONTINUED)):
        tokens = [text[len(p) + at] for text, p in zip(texts, PROMPTS, strict=True)]
        logits = model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            attention_mask=(columns <= slots.positions[:, None])[:, None, None],
            position_ids=slots.positions[:, None],
            past_key_values=slots,
            use_cache=True,
        ).logits[:, -1]
        slots.positions += 1
    return max(_relative(logits[row], _whole(model, text)) for row, text in enumerate(texts))


def _whole(model: PreTrainedModel, tokens: tuple[int, ...]) -> Tensor:
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1]
    return logits


def _relative(one: Tensor, other: Tensor) -> float:
    one, other = one.float(), other.float()
    return float((one - other).norm() / other.norm().clamp(min=1e-30))
