"""Merging FP8 checkpoints beside the same ones in bf16, on the CPU.

    python benchmarks/quantised.py --work /tmp/bench
    python benchmarks/quantised.py --work /tmp/bench --sizes 0.3 --methods linear --repeat 3

Three OLMoE-shaped checkpoints (a base and two fine-tunes) as in `merge.py`, and their copies in
FP8 with a scale for each 128 x 128 block, are made in --work on first use. Time is wall clock of
the whole command; memory is the peak resident set of its process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from merge import CONFIGS, LAYERS, make_checkpoint, measure

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
NAMES = ("base", "math", "code")


def make_fp8(plain: Path, folder: Path) -> None:
    """The copy that a publisher would make: projections in blocks, the rest as it is."""
    if (folder / "config.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weight_map = {}
    for shard in sorted(plain.glob("*.safetensors")):
        made: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(shard).items():
            if "_proj." not in name:
                made[name] = tensor
                continue
            rows, columns = tensor.shape
            blocks = tensor.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = blocks.abs().amax((1, 3)) / LARGEST
            codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            made[name] = codes.view(rows, columns)
            made[f"{name}_scale_inv"] = scale
        save_file(made, folder / shard.name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(made, shard.name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config))


def make(folder: Path, layers: int) -> None:
    for seed, name in enumerate(NAMES):
        make_checkpoint(folder / name, layers, seed)
        make_fp8(folder / name, folder / f"{name}-fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=["1.3"], choices=list(LAYERS))
    parser.add_argument("--methods", nargs="+", default=["linear", "ties"])
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    for size in args.sizes:
        folder = args.work / size
        # Elsewhere: a child's peak memory is counted from that of the process that starts it.
        maker = get_context("spawn").Process(target=make, args=(folder, LAYERS[size]))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise SystemExit(f"{folder} could not be made")
        for method in args.methods:
            for kind, end, flags in (
                ("bf16 → bf16", "", []),
                ("FP8 → bf16", "-fp8", []),
                ("FP8 → FP8", "-fp8", ["--requantize", "same"]),
            ):
                config, out = folder / f"{method}{end}.yml", args.work / "out"
                text = CONFIGS[method]
                for name in NAMES:
                    text = text.replace(name.upper(), str(folder / f"{name}{end}"))
                config.write_text(text)
                command = [sys.executable, "-m", "moemerge", "merge", str(config), str(out), "-q"]
                for _ in range(args.repeat):
                    seconds, peak, ok = measure([*command, "--device", "cpu", *flags], out)
                    words = f"{size:>4} GB  {method:<8} {kind:<12} {seconds:6.1f} s"
                    print(f"{words} {peak / 1e9:6.2f} GB  {'' if ok else 'FAILED'}", flush=True)
                shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
