"""The same tokenizer settings through mergekit and moemerge: equal vocabularies and embeddings.

    python benchmarks/parity_tokenizer.py --mergekit PATH/TO/mergekit-yaml [--keep FOLDER]

Tiny dense Llamas with unlike vocabularies are made on the fly. Tokens are matched by their text:
the ids that mergekit gives to the tokens of a union depend on its process' hash seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARS = list("abcdefgh")
PLAIN = [*CHARS, "ab", "cd"]
TOLERANCE = 1e-5
MATRICES = ("model.embed_tokens.weight", "lm_head.weight")


def make(
    folder: Path,
    seed: int,
    vocab: Sequence[str],
    special: Sequence[str],
    plain: Sequence[str] = (),
    rows: int | None = None,
) -> None:
    """A one-layer Llama whose embedding may have fewer or more rows than its tokenizer tokens."""
    model = models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, lstrip=True) for t in plain])
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    config = LlamaConfig(
        vocab_size=rows or len(fast),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
    )
    torch.manual_seed(seed)
    llama: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    llama.float().save_pretrained(folder)
    fast.save_pretrained(folder)


def make_models(root: Path) -> None:
    ends = ["<s>", "</s>"]
    make(root / "base", 1, PLAIN, ends, rows=16)
    make(root / "chat", 2, PLAIN, [*ends, "<|im_start|>", "<|im_end|>"])
    make(root / "other", 3, [*CHARS[::-1], "ef", "ab"], ends, ["<tool>"], rows=20)
    make(root / "end", 4, PLAIN, [*ends, "<|im_end|>"])
    make(root / "short", 5, PLAIN, [*ends, "<|im_end|>", "<q>"], rows=12)


def cases(root: Path) -> dict[str, dict[str, Any]]:
    chat = str(root / "chat")
    token = {"kind": "model_token", "model": chat}
    overrides = {
        "<|im_end|>": {"source": chat},
        "a": {"source": {"kind": "zero"}, "force": True},
        "b": {"source": {"kind": "zero"}},
        "ef": {"source": {**token, "token": "ab"}},
        "<new>": {"source": {**token, "token_id": 3}},
    }
    return {
        "union": {"tokenizer_source": "union"},
        "base": {"tokenizer_source": "base"},
        "model": {"tokenizer_source": str(root / "other")},
        "overrides": {"tokenizer": {"source": "union", "tokens": overrides}},
        "padding": {"tokenizer": {"source": "union", "pad_to_multiple_of": 32}},
    }


def configs(root: Path) -> dict[str, dict[str, Any]]:
    """Every setting with a linear merge and with one that takes task vectors."""
    base = str(root / "base")
    first = {"model": base, "parameters": {"weight": 0.5}}
    out: dict[str, dict[str, Any]] = {}
    for name, settings in cases(root).items():
        # In a union mergekit fails on a token that `short` has no row for and another model has.
        names = ("chat", "other", "end", *(["short"] if name in ("base", "model") else []))
        sources = [{"model": str(root / n), "parameters": {"weight": 0.3}} for n in names]
        common = {"base_model": base, "dtype": "float32", **settings}
        out[f"linear-{name}"] = {
            "merge_method": "linear",
            "models": [first, *sources],
            **common,
        }
        out[f"task_arithmetic-{name}"] = {
            "merge_method": "task_arithmetic",
            "models": sources,
            **common,
        }
    return out


def difference(theirs: Path, ours: Path) -> str | None:
    """Why two merged models differ, or None."""
    vocab_theirs = AutoTokenizer.from_pretrained(theirs).get_vocab()
    vocab_ours = AutoTokenizer.from_pretrained(ours).get_vocab()
    if set(vocab_theirs) != set(vocab_ours):
        return f"tokens differ: {sorted(set(vocab_theirs) ^ set(vocab_ours))}"
    sizes = [json.loads((f / "config.json").read_text())["vocab_size"] for f in (theirs, ours)]
    if sizes[0] != sizes[1]:
        return f"vocab_size {sizes[0]} (mergekit), {sizes[1]} (moemerge)"
    tokens = sorted(vocab_ours)
    spare = list(range(max(vocab_ours.values()) + 1, sizes[0]))
    tensors_theirs, tensors_ours = tensors(theirs), tensors(ours)
    for name in MATRICES:
        a = tensors_theirs[name][[vocab_theirs[t] for t in tokens] + spare]
        b = tensors_ours[name][[vocab_ours[t] for t in tokens] + spare]
        error = ((a - b).norm() / a.norm()).item()
        if not error <= TOLERANCE:
            return f"{name}: relative difference {error:.2e}"
    return None


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= load_file(file)
    return out


def ran(command: list[str | Path]) -> str | None:
    """None, or the last line of what a failing command said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"{command[0]}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"


def run(root: Path, mergekit: str, moemerge: str) -> int:
    """The number of settings that differ."""
    make_models(root / "models")
    failures = 0
    for name, config in configs(root / "models").items():
        file = root / f"{name}.yml"
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        theirs, ours = root / "mergekit" / name, root / "moemerge" / name
        for folder in (theirs, ours):
            folder.parent.mkdir(exist_ok=True)
        failed = ran([mergekit, file, theirs, "--quiet"]) or ran([moemerge, "merge", file, ours])
        found = failed or difference(theirs, ours)
        failures += found is not None
        print(f"{name:28s} {found or 'equal'}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mergekit", required=True, help="path of mergekit-yaml")
    parser.add_argument("--moemerge", default=str(Path(sys.executable).parent / "moemerge"))
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it there")
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True)
        return run(args.keep, args.mergekit, args.moemerge)
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), args.mergekit, args.moemerge)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
