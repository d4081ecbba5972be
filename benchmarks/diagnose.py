"""What a diagnosis costs beside the plain forwards of the models it runs.

    OMP_NUM_THREADS=1 python benchmarks/diagnose.py --work /tmp/bench --tokens 100000
    python benchmarks/diagnose.py --work /dev/shm/b --shape olmoe-1b-7b --layers 4 --device cuda

Plain: the diagnosed model over all tokens and each source over its own domain's, whole models in
transformers, already in memory, logits computed, nothing else. Diagnosis: one call of
`moemerge.diagnose` from opening the folders to the figures, weights read from disk. On a CPU the
seconds are of the processor, so that other work on the machine does not count; on a GPU of the
wall clock. The goal is a ratio of 1.3 at 100 000 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import synthetic
from moemerge.runtime.process import configure_process, reuse_freed_memory
from synthetic import SHAPES, Shape

# OLMoE's experts and choices at an eighth of its width, where routing weighs most.
NARROW = Shape("olmoe", 4, 256, 64, 8, 128, 4, 4, 64, 2048)
GOAL = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shape", choices=["narrow", *SHAPES], default="narrow")
    parser.add_argument("--layers", type=int, help="fewer than the real model has")
    parser.add_argument("--tokens", type=int, default=100_000, help="of both domains")
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--repeats", type=int, default=1, help="the best of so many")
    parser.add_argument("--swaps", action="store_true", help="the swapped models too")
    parser.add_argument(
        "--tuned", action="store_true", help="plain forwards too reuse freed memory (glibc)"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tuned:
        reuse_freed_memory()
    found = run(args)
    show(found)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


def run(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    shape = NARROW if args.shape == "narrow" else SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers)
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / f"{args.shape}-{shape.layers}"
    synthetic.make_model(model, shape, device)
    sources, data = {}, {}
    for seed, (name, words) in enumerate(synthetic.domains(shape.vocabulary).items()):
        sources[name] = source_of(model, name, seed + 1)
        data[name] = args.work / f"{args.shape}-{name}-{args.tokens}-{args.row_tokens}.jsonl"
        synthetic.make_text(data[name], args.tokens // 2, args.row_tokens, words, seed)
    times = [one(model, sources, data, device, dtype, args.swaps) for _ in range(args.repeats)]
    plain = min(t["plain"] for t in times)
    diagnosis = min(t["diagnosis"] for t in times)
    return {
        "shape": asdict(shape),
        "tokens": args.tokens,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "torch": torch.__version__,
        "swaps": args.swaps,
        "runs": times,
        "plain": plain,
        "diagnosis": diagnosis,
        "ratio": diagnosis / plain,
        "goal": GOAL,
    }


def source_of(model: Path, name: str, seed: int) -> Path:
    """The model with other routers, whole: it will be run."""
    from moemerge.checkpoint import Checkpoint, CheckpointPatch

    folder = model.with_name(f"{model.name}-whole-{name}")
    if folder.exists():
        return folder
    generator = torch.Generator().manual_seed(seed)
    checkpoint = Checkpoint.open(model)
    with CheckpointPatch(checkpoint, folder, link=True) as patch:
        for info in list(checkpoint.tensors.values()):
            if info.name.endswith("mlp.gate.weight"):
                router = checkpoint.read(info.name).float()
                noise = torch.randn(router.shape, generator=generator)
                moved = router + synthetic.ROUTER_NOISE * router.std() * noise
                patch.write(info.name, moved.to(info.dtype.torch))
        patch.commit()
    return folder


def one(
    model: Path,
    sources: dict[str, Path],
    data: dict[str, Path],
    device: torch.device,
    dtype: str,
    swaps: bool,
) -> dict[str, float]:
    import moemerge

    spent = {"plain": 0.0, "loading": 0.0, "diagnosis": 0.0}
    batches = batches_of(model, data, device)
    everything = [batch for found in batches.values() for batch in found]
    times = 2 if swaps else 1  # a swapped model is one more forward of its weights
    plain(model, everything * times, device, dtype, spent)
    for name, source in sources.items():
        plain(source, batches[name] * times, device, dtype, spent)
    configure_process()  # as the command says
    with timed(spent, "diagnosis", device):
        values = {"device": str(device), "dtype": dtype, "swaps": swaps}
        settings = moemerge.DiagnosisSettings.model_validate(values)
        found = moemerge.diagnose(model, sources=sources, data=data, settings=settings)
    spent["mismatch"] = sum(t.mismatch for t in found.totals) / len(found.totals)
    return spent


def batches_of(
    model: Path, data: dict[str, Path], device: torch.device
) -> dict[str, list[torch.Tensor]]:
    """The very batches that the diagnosis makes (rows are of one length: nothing is padded)."""
    from moemerge.families.opened import open_model
    from moemerge.forward.settings import batch_tokens
    from moemerge.text.batches import DEFAULT_BATCH_TOKENS, make_batches
    from moemerge.text.domains import load_domains
    from moemerge.text.tokens import load_tokenizer

    domains = load_domains(dict(data), load_tokenizer(model))
    size = min(batch_tokens(open_model("model", model), device), DEFAULT_BATCH_TOKENS)
    made = make_batches(domains, batch_tokens=size)
    return {name: [b.input_ids for b in made if b.domain == name] for name in data}


def plain(
    folder: Path,
    batches: list[torch.Tensor],
    device: torch.device,
    dtype: str,
    spent: dict[str, float],
) -> None:
    from transformers import AutoModelForCausalLM

    with timed(spent, "loading", device):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        model = model.to(device).eval()
    with torch.inference_mode():
        model(input_ids=batches[0].to(device), use_cache=False)  # warm
        with timed(spent, "plain", device):
            for batch in batches:
                model(input_ids=batch.to(device), use_cache=False)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def timed(spent: dict[str, float], what: str, device: torch.device) -> Iterator[None]:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    begin = clock()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    spent[what] += clock() - begin


def show(found: dict[str, Any]) -> None:
    shape = found["shape"]
    print(
        f"{shape['family']}, {shape['layers']} layers, width {shape['width']}, {shape['experts']} "
        f"experts, top {shape['top_k']}; {found['tokens']} tokens; {found['device']}, "
        f"{found['threads']} thread(s), {found['dtype']}, torch {found['torch']}"
    )
    print("\n| | seconds | beside the plain forwards |\n|---|---|---|")
    loading = min(t["loading"] for t in found["runs"])
    for name, seconds in (
        ("plain forwards", found["plain"]),
        ("plain forwards and loading", found["plain"] + loading),
        ("moemerge diagnose", found["diagnosis"]),
    ):
        print(f"| {name} | {seconds:.2f} | {seconds / found['plain']:.2f} |")
    print(f"\nratio {found['ratio']:.3f}, goal {found['goal']}")


if __name__ == "__main__":
    main()
