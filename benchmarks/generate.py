"""Tokens a second of our continuous batching beside plain `model.generate` with static batches.

A model of OLMoE-1B-7B's shape with random weights; no end token, so that every completion has the
same length and continuous batching gains nothing from short ones.

    python benchmarks/generate.py --device cuda --json generate.json
    python benchmarks/generate.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, OlmoeConfig, OlmoeForCausalLM

from moemerge.config.faults import parse_settings
from moemerge.config.text_settings import GenerationSettings
from moemerge.lab.generation.continuous import ContinuousBatch, why_not
from moemerge.lab.generation.engine import CompletionRequest

TINY = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 512,
}  # fmt: skip

SHORT = (16, 48)  # new tokens of the two runs that a long one is computed from


def build(device: str, *, tiny: bool) -> Any:
    torch.manual_seed(0)
    make: Any = OlmoeConfig
    config = make(**(TINY if tiny else {"num_experts": 64, "num_experts_per_tok": 8}))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        build_model: Any = OlmoeForCausalLM._from_config
        return build_model(config, dtype=dtype).eval()


def timed(work: Callable[[], Any], device: str) -> tuple[Any, float]:
    begun = time.perf_counter()
    result = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return result, time.perf_counter() - begun


def plain(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """What a script would do with one batch of prompts, and then with the next."""
    make: Any = GenerationConfig
    config = make(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    generate: Any = model.generate
    ids = torch.tensor(prompts, device=model.device)
    out = generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    written: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return written


def ours(model: Any, prompts: list[list[int]], new: int, slots: int) -> dict[int, list[int]]:
    settings = parse_settings(GenerationSettings, {"max_new_tokens": new}, "benchmark")
    batch = ContinuousBatch(
        model,
        settings,
        ends=frozenset(),
        slots=slots,
        capacity=len(prompts[0]) + new,
        stopped=lambda tokens: False,
    )
    wanted = [CompletionRequest(place, 0, tuple(tokens)) for place, tokens in enumerate(prompts)]
    return {done.wanted.prompt: done.tokens for done in batch.run(wanted)}


def whole_run(work: Callable[[int], Any], new: int, device: str) -> tuple[float, float]:
    """Seconds for `new` tokens, and for one step: from two short runs, for the steps are alike."""
    few, more = SHORT
    if new <= more:
        _, seconds = timed(partial(work, new), device)
        return seconds, seconds / new
    work(few)  # warm: libraries load and graphs are recorded
    _, first = timed(partial(work, few), device)
    _, second = timed(partial(work, more), device)
    step = (second - first) / (more - few)
    return second + (new - more) * step, step


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    begun = time.perf_counter()
    device, new = arguments.device, arguments.new
    model = build(device, tiny=arguments.tiny)
    print("built", f"{time.perf_counter() - begun:.1f} s", flush=True)
    print("experts:", model.config._experts_implementation, flush=True)
    print("continuous batching:", why_not(model) or "sound", flush=True)
    rng = torch.Generator().manual_seed(1)
    shape = (arguments.prompts, arguments.length)
    prompts = torch.randint(5, model.config.vocab_size, shape, generator=rng).tolist()
    total = arguments.prompts * new
    result: dict[str, Any] = {"device": device, "prompts": shape[0], "length": shape[1], "new": new}
    runs: list[tuple[str, int, Callable[[int], Any]]] = [
        (f"ours, {slots} slots", 1, partial(_ours, model, prompts, slots))
        for slots in arguments.slots
    ]
    # Static batches are alike: one is timed, and counts as often as there are batches.
    runs += [
        (f"plain, batch {size}", -(-len(prompts) // size), partial(plain, model, prompts[:size]))
        for size in arguments.static
    ]
    for name, times, work in runs:
        if time.perf_counter() - begun > arguments.seconds:
            print(f"{name}: left out, {arguments.seconds} s are over", flush=True)
            continue
        try:
            seconds, step = whole_run(work, new, device)
            seconds *= times
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory", flush=True)
            torch.cuda.empty_cache()
            continue
        result[name] = round(total / seconds, 1)
        told = f"{seconds:.2f} s, {step * 1000:.1f} ms a step, {total / seconds:.0f} tokens/s"
        print(f"{name}: {told}", flush=True)
    best = max((v for name, v in result.items() if name.startswith("plain")), default=None)
    mine = max((v for name, v in result.items() if name.startswith("ours")), default=None)
    if best and mine:
        result["ratio"] = round(mine / best, 2)
    slots = arguments.slots[0]
    whole, half = ours(model, prompts, 24, slots), ours(model, prompts[::2], 24, slots)
    equal = sum(half[place] == whole[2 * place] for place in half)
    result["same texts in another company"] = round(equal / len(half), 4)
    if device != "cpu":
        result["card"] = torch.cuda.get_device_name()
        result["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return result


def _ours(model: Any, prompts: list[list[int]], slots: int, new: int) -> Any:
    return ours(model, prompts, new, slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy, to try this script")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--static", type=int, nargs="+", default=[512, 256])
    parser.add_argument("--slots", type=int, nargs="+", default=[512])
    parser.add_argument("--seconds", type=float, default=600, help="begin nothing after these")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    result = measure(arguments)
    print(json.dumps(result, indent=2))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
