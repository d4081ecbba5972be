"""Accuracy of the bundled specialists in INT4, before and after a repair.

    python -m evidence.rounding docs/data/rounding.json

Every matrix of attention and experts is rounded to the nearest code, with one scale for each row or
for each group of columns (compressed-tensors). The sources of all repairs are the specialists
before rounding.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import moemerge
from evidence.gptq import round_by_gptq, write_rounded
from evidence.layout import EOS
from evidence.pruning import read_problems
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.demo import accuracy, draw_test_problems, one_thread

BITS = 4
LARGEST = 2 ** (BITS - 1)
PROBLEMS = 1000
ROWS = 512
DOMAINS = ("math", "code")
GROUPS = {"a row": None, "a group of 32": 32}  # columns that share a scale
ROUNDED = re.compile(r"(self_attn|experts)\..*_proj\.weight")
SHARED: dict[str, Any] = {"limit": ROWS, "measure": False, "device": "cpu", "dtype": "float32"}


def rounded(model: Path, out: Path, group: int | None) -> Path:
    """Write a copy of a model with its matrices in INT4."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, value in load_file(file).items():
            if ROUNDED.search(name):
                tensors |= packed(name.removesuffix("weight"), value, group or value.shape[1])
            else:
                tensors[name] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group"}
    weights = {"num_bits": BITS, "type": "int", "symmetric": True, "group_size": group, **strategy}
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


def packed(stem: str, matrix: Tensor, width: int) -> dict[str, Tensor]:
    """Return a matrix as words of eight codes, the first in the lowest bits, with its scales."""
    rows, columns = matrix.shape
    groups = matrix.float().view(rows, -1, width)
    scale = groups.abs().amax(-1, keepdim=True) / (LARGEST - 0.5)
    codes = (groups / scale.clamp_min(1e-12)).round().clamp(-LARGEST, LARGEST - 1)
    unsigned = (codes.view(rows, -1, 32 // BITS) + LARGEST).long()
    words = (unsigned << (BITS * torch.arange(32 // BITS))).sum(-1)
    return {
        f"{stem}weight_packed": torch.where(words >= 2**31, words - 2**32, words).to(torch.int32),
        f"{stem}weight_scale": scale.squeeze(-1),
        f"{stem}weight_shape": torch.tensor([rows, columns]),
    }


def round_afterwards(repaired: Path, like: Path, out: Path) -> None:
    """Round a repaired model to the format of another one."""
    models = [
        {"model": str(model), "parameters": {"weight": weight}}
        for model, weight in ((like, 0.0), (repaired, 1.0))
    ]
    config = out.with_suffix(".yml")
    parameters = {"normalize": False}
    config.write_text(
        yaml.safe_dump({"merge_method": "linear", "models": models, "parameters": parameters})
    )
    moemerge.merge(config, out, requantize="same")


def repairs(original: Path, model: Path, given: dict[str, Any]) -> dict[str, Callable[[Path], Any]]:
    """Return by name what writes each row's model."""
    sources = {"sources": dict.fromkeys(given["data"], original), **given, **SHARED}

    def refit_then_round(out: Path) -> None:
        floats = out.with_name("floats")
        moemerge.refit(model, floats, **sources)
        round_afterwards(floats, model, out)
        shutil.rmtree(floats)

    exact: dict[str, Any] = {"targets": "source-features", "objective": "exact"}
    return {
        "calibrate": lambda out: moemerge.calibrate(model, out, **sources, **exact),
        "refit, then rounded": refit_then_round,
        "refit --requantize same": lambda out: moemerge.refit(
            model, out, **sources, requantize="same"
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    trained, rows = bundled_set(), []
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        for domain in DOMAINS:
            problems = draw_test_problems(domain, PROBLEMS)

            def solved(
                model: Path, scale: str, repair: str, domain: str = domain, own: Any = problems
            ) -> None:
                count = sum(accuracy(model, own, device="cpu"))
                rows.append({"domain": domain, "scale": scale, "repair": repair, "solved": count})
                print(rows[-1], flush=True)

            original = trained.models[domain]
            solved(original, "", "original")
            for scale, group in GROUPS.items():
                folder = Path(scratch) / f"{domain}-{scale.replace(' ', '-')}"
                folder.mkdir()
                model = rounded(original, folder / "rounded", group)
                solved(model, scale, "rounded")
                texts = [p.prompt + p.answer + EOS for p in read_problems(domain)[:ROWS]]
                write_rounded(original, folder / "gptq", round_by_gptq(original, texts, group))
                solved(folder / "gptq", scale, "rounded by GPTQ")
                given = {"data": {domain: trained.data[domain]}}
                for name, repair in repairs(original, model, given).items():
                    repair(folder / "out")
                    solved(folder / "out", scale, name)
                    shutil.rmtree(folder / "out")
    content = {"problems": PROBLEMS, "rows": ROWS, "measured": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
