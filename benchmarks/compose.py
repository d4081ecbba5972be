"""`moemerge compose` of two dense models at a real model's shape: seconds and peak memory.

    python benchmarks/compose.py --work /tmp/bench --tokens 256

The model has random bf16 weights and is made in --work on first use (7 GB); it is also the second
expert. Each mode has its own process and removes what it composed. `fit` reads --tokens in all;
`hidden` reads two prompts per expert, of --prompt-tokens each.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import job
import synthetic
from job import Subject

MODES = ("random", "hidden", "fit")


def main() -> None:
    parser = job.command_line(__doc__, row_tokens=64)
    parser.set_defaults(shape="llama-7gb", device="cpu")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    job.run(parser, compose, run_all)


def compose(spec: dict[str, Any]) -> None:
    from moemerge import api

    begin = time.perf_counter()
    api.compose(spec["config"], spec["out"], device=spec["device"])
    seconds = time.perf_counter() - begin
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    # getrusage would include the memory of the process that started this one.
    figures = {"seconds": seconds, "cpu": time.process_time(), "peak": int(found[1]) * 1024}
    Path(spec["report"]).write_text(json.dumps(figures))


def run_all(args: argparse.Namespace) -> None:
    subject = Subject.of(args)
    texts = subject.texts(args, args.tokens)
    for mode in args.modes:
        experts = []
        for name, words in synthetic.domains(subject.shape.vocabulary).items():
            numbers = words[: 2 * args.prompt_tokens]
            prompts = [" ".join(f"w{n}" for n in numbers[i::2]) for i in (0, 1)]
            text = {"data": texts[name]} if mode == "fit" else {"positive_prompts": prompts}
            experts.append({"source_model": str(subject.model), **text})
        config = {"base_model": str(subject.model), "gate_mode": mode, "experts": experts}
        out = args.work / "composed"
        shutil.rmtree(out, ignore_errors=True)
        spec = {"config": config, "out": str(out), "device": str(subject.device)}
        found = job.in_own_process(__file__, args.work, spec)
        shutil.rmtree(out, ignore_errors=True)
        if found is not None:
            print(
                f"{mode}: {found['seconds']:.1f} s, {found['cpu']:.1f} s of processor time, peak "
                f"{found['peak'] / 1e9:.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
