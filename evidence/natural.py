"""Train an MoE on natural text, and specialists of it: `python -m evidence natural CORPUS OUT`.

CORPUS has `tokenizer.json` and files `*.jsonl.xz`. A line is one document:
`{"d": domain, "s": "train" or "validation", "p": package, "t": text}`. OUT gets the base, a folder
of specialists for each regime, calibration text from validation packages, test rows from packages
that nothing else uses, and `training.json`.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import math
import random
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

SPECIALISTS = ("python", "js", "prose")
DOMAINS = (*SPECIALISTS, "general", "math")
MIXTURE = {"python": 0.2, "js": 0.2, "prose": 0.2, "general": 0.35, "math": 0.05}
BASE_PACKAGES = 0.4  # share of a specialist's packages that the base sees
LENGTH = 512  # tokens of a row
END, PAD = 0, 1  # END precedes every document
TEST_SHARE = 8  # one package in this many is for tests only, with --more-text one for calibration
ROWS_OF_DOCUMENT = 6  # at most, in test and calibration text

Ids = NDArray[np.uint16]
Documents = list[tuple[str, Ids]]  # (package, token ids)


@dataclass(frozen=True)
class Size:
    """Shape of the models and the length of the base's training."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_experts: int
    num_experts_per_tok: int
    base_steps: int


@dataclass(frozen=True)
class Regime:
    """How specialists are fine-tuned: what decides how far the routing moves."""

    rate: float
    steps: int
    router_rate: float = 1.0  # factor on the routers' learning rate
    balance: float = 0.01  # weight of the load-balancing loss
    rank: int | None = None  # of adapters on the matrices of the layers; None: train all weights


SIZES = {
    "tiny": Size(64, 32, 2, 2, 8, 2, 20),
    "small": Size(192, 96, 6, 6, 16, 4, 1500),
    "large": Size(512, 256, 8, 8, 32, 4, 900),
}
REGIMES = {
    "mild": Regime(5e-4, 250),
    "strong": Regime(2e-3, 250),
    "routers": Regime(5e-4, 250, router_rate=15.0, balance=0.05),
    "lora": Regime(2e-3, 250, rank=16),
    "unbalanced": Regime(5e-4, 250, balance=0.0),
    "short": Regime(5e-4, 60),
    "long": Regime(5e-4, 1000),
}
BASE_RATE = 2e-3
ROWS = 64  # of a training step


# --- text -----------------------------------------------------------------------------------------


def read_corpus(folder: Path, *, more_text: bool) -> dict[tuple[str, str], Documents]:
    """Return the documents by (domain, split).

    Test packages are taken from the training split, and with `more_text` also packages whose text
    is for calibration.
    """
    taken = {0: "test", 1: "validation"} if more_text else {0: "test"}
    files = sorted(folder.glob("*.jsonl.xz"))
    corpus: dict[tuple[str, str], Documents] = defaultdict(list)
    with ProcessPoolExecutor() as pool:
        for rows in pool.map(_tokenise, files, [folder / "tokenizer.json"] * len(files)):
            for domain, split, package, ids in rows:
                if split == "train":
                    split = taken.get(zlib.crc32(package.encode()) % TEST_SHARE, split)
                corpus[domain, split].append((package, ids))
    return corpus


def _tokenise(path: Path, tokenizer_file: Path) -> list[tuple[str, str, str, Ids]]:
    from tokenizers import Tokenizer

    with lzma.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    encoded = Tokenizer.from_file(str(tokenizer_file)).encode_batch([row["t"] for row in rows])
    return [
        (row["d"], row["s"], row["p"], np.array([END, *one.ids], dtype=np.uint16))
        for row, one in zip(rows, encoded, strict=True)
    ]


def text_rows(documents: Documents, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of at most LENGTH tokens, each of one document, in all about `tokens` tokens."""
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    rows: list[dict[str, Any]] = []
    total = 0
    for number in order:
        package, ids = documents[number]
        for start in range(0, min(len(ids), ROWS_OF_DOCUMENT * LENGTH), LENGTH):
            row = ids[start : start + LENGTH].tolist()
            if len(row) >= LENGTH // 4:
                rows.append({"package": package, "document": number, "ids": row})
                total += len(row)
        if total >= tokens:
            break
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> None:
    """Write rows as JSON lines that moemerge reads; the package is kept as the row's group."""
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            text = tokenizer.decode([i for i in row["ids"] if i != END], skip_special_tokens=False)
            out.write(json.dumps({"text": text, "package": row["package"]}) + "\n")


class Batches:
    """Random rows of each domain's documents, in the given shares."""

    def __init__(
        self,
        documents: Mapping[str, Documents],
        shares: Mapping[str, float],
        device: str,
        seed: int,
    ) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._runs: list[Tensor] = []
        for domain in shares:
            order = torch.randperm(len(documents[domain]), generator=self._random).tolist()
            run = np.concatenate([documents[domain][number][1] for number in order])
            self._runs.append(torch.from_numpy(run.astype(np.int32)).to(device))
        self._shares = torch.tensor(list(shares.values()))
        self._offsets = torch.arange(LENGTH, device=device)

    def next(self, rows: int) -> Tensor:
        """Return (rows, LENGTH) token ids."""
        drawn = torch.multinomial(self._shares, rows, True, generator=self._random)
        parts = []
        for number, run in enumerate(self._runs):
            count = int((drawn == number).sum())
            starts = torch.randint(len(run) - LENGTH, (count, 1), generator=self._random)
            parts.append(run[starts.to(run.device) + self._offsets])
        return torch.cat(parts).long()


# --- training -------------------------------------------------------------------------------------


@torch.compile(disable=not torch.cuda.is_available())
def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


class Trained:
    """The float32 values that are trained for one weight: its copy, or a low-rank change of it."""

    def __init__(self, weight: Tensor, rank: int | None) -> None:
        self.start = weight.detach().float().clone()
        self.factors: list[Tensor] = []  # B (…, out, rank) and A (…, rank, in)
        if rank is not None:
            *stack, rows, columns = weight.shape
            right = self.start.new_empty(*stack, rank, columns).uniform_(-1, 1) / columns**0.5
            self.factors = [self.start.new_zeros(*stack, rows, rank), right]

    @property
    def values(self) -> list[Tensor]:
        return self.factors or [self.start]

    def take_gradient(self, gradient: Tensor) -> None:
        if self.factors:
            left, right = self.factors
            left.grad, right.grad = gradient @ right.mT, left.mT @ gradient
        else:
            self.start.grad = gradient

    def weight(self) -> Tensor:
        return self.start + self.factors[0] @ self.factors[1] if self.factors else self.start


def trained_values(model: Any, regime: Regime) -> dict[str, Trained]:
    """Return what is trained, by the name of its weight."""
    found = {}
    for name, parameter in model.named_parameters():
        if regime.rank is None or (parameter.ndim > 1 and ".layers." in name):
            found[name] = Trained(parameter, regime.rank)
    return found


def train(model: Any, batches: Batches, regime: Regime) -> dict[str, float]:
    """Train with AdamW in float32; the rate falls to a tenth (cosine)."""
    weights, trained = dict(model.named_parameters()), trained_values(model, regime)
    values = [value for one in trained.values() for value in one.values]
    groups = []
    for name, one in trained.items():
        decay = 0.1 if weights[name].ndim > 1 and "embed" not in name else 0.0
        factor = regime.router_rate if name.endswith("mlp.gate.weight") else 1.0
        groups.append({"params": one.values, "weight_decay": decay, "factor": factor})
    on_gpu = values[0].is_cuda
    optimiser = torch.optim.AdamW(groups, lr=regime.rate, betas=(0.9, 0.95), fused=on_gpu)
    warmup = max(20, regime.steps // 20)
    model.train()
    recent: list[Tensor] = []
    began = time.monotonic()
    for step in range(regime.steps):
        decayed = 0.1 + 0.45 * (1 + math.cos(math.pi * step / regime.steps))
        for group in optimiser.param_groups:
            group["lr"] = regime.rate * group["factor"] * min(1.0, (step + 1) / warmup) * decayed
        ids = batches.next(ROWS)
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
        loss = next_token_loss(out.logits, ids)
        (loss + regime.balance * out.aux_loss).backward()
        for name, parameter in weights.items():
            if name in trained:
                trained[name].take_gradient(parameter.grad.float())
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        optimiser.step()
        with torch.no_grad():
            new = [one.weight() for one in trained.values()]
            torch._foreach_copy_([weights[name] for name in trained], new)
        recent.append(loss.detach())
    last = float(torch.stack(recent[-50:]).mean())
    tokens = regime.steps * ROWS * LENGTH
    return {"tokens": tokens, "last_loss": last, "seconds": time.monotonic() - began}


def scaled(regime: Regime, factor: float) -> Regime:
    return replace(regime, steps=max(1, round(regime.steps * factor)))


def new_model(size: Size, architecture: str, vocabulary: int, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {name: value for name, value in asdict(size).items() if name != "base_steps"}
    if architecture == "qwen3_moe":
        shape["moe_intermediate_size"] = size.intermediate_size
        shape["head_dim"] = size.hidden_size // size.num_attention_heads
    config = AutoConfig.for_model(
        architecture,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        num_key_value_heads=size.num_attention_heads,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=PAD,
        **shape,
    )
    config._experts_implementation = "grouped_mm" if device == "cuda" else "eager"
    make: Callable[[Any], Any] = AutoModelForCausalLM.from_config
    model = make(config).to(device, torch.bfloat16)
    if device == "cuda":
        for layer in model.model.layers:
            layer.compile()
    return model


def save(model: Any, folder: Path, tokenizer_file: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    make: Callable[..., Any] = PreTrainedTokenizerFast
    make(
        tokenizer_file=str(tokenizer_file),
        eos_token="<|end|>",
        bos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=2048,
    ).save_pretrained(folder)


def moved(model: Any, start: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far each kind of weight moved, as a share of its norm."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, parameter in model.named_parameters():
        kind = next(
            (k for k in ("mlp.gate.", "experts", "self_attn", "norm") if k in name), "embed"
        )
        before = start[name].float()
        sums[kind][0] += float((parameter.detach().float() - before).square().sum())
        sums[kind][1] += float(before.square().sum())
    return {kind.strip("."): round(math.sqrt(x / y), 4) for kind, (x, y) in sums.items()}


# --- the set --------------------------------------------------------------------------------------


def make_set(corpus_folder: Path, out: Path, options: argparse.Namespace) -> None:
    """Train the base and the specialists of every regime, and write their text."""
    from tokenizers import Tokenizer

    torch.manual_seed(options.seed)
    tokenizer_file = corpus_folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    corpus = read_corpus(corpus_folder, more_text=options.more_text)
    (out / "text").mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        test = text_rows(corpus[domain, "test"], options.test_tokens, options.seed)
        with lzma.open(out / "text" / f"{domain}-test.jsonl.xz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in test)
        calibration = text_rows(corpus[domain, "validation"], 10**9, options.seed + 1)
        random.Random(options.seed + 2).shuffle(calibration)
        chosen = calibration[: options.calibration_rows]
        write_rows(out / "text" / f"{domain}.jsonl", chosen, tokenizer)

    device, size = options.device, SIZES[options.size]
    model = new_model(size, options.architecture, tokenizer.get_vocab_size(), device)
    parameters = sum(p.numel() for p in model.parameters())
    regimes = {name: scaled(REGIMES[name], options.steps_scale) for name in options.regime}
    record: dict[str, Any] = {
        "seed": options.seed,
        "architecture": options.architecture,
        "parameters": parameters,
        "size": asdict(size),
        "calibration_rows": options.calibration_rows,
        "more_text": options.more_text,
        "regimes": {name: asdict(regime) for name, regime in regimes.items()},
        "training": {},
    }
    seen = {}
    for domain in DOMAINS:
        packages = sorted({package for package, _ in corpus[domain, "train"]})
        random.Random(f"base {options.seed} {domain}").shuffle(packages)
        share = BASE_PACKAGES if domain in SPECIALISTS else 1.0
        kept = set(packages[: math.ceil(len(packages) * share)])
        seen[domain] = [row for row in corpus[domain, "train"] if row[0] in kept]
    base_regime = scaled(Regime(BASE_RATE, size.base_steps), options.steps_scale)
    if (out / "base").exists():
        model = type(model).from_pretrained(out / "base", dtype=torch.bfloat16, config=model.config)
        model = model.to(device)
    else:
        batches = Batches(seen, MIXTURE, device, options.seed)
        record["training"]["base"] = train(model, batches, base_regime)
        print("base", record["training"]["base"], flush=True)
        save(model, out / "base", tokenizer_file)
    start = copy.deepcopy(model.state_dict())
    for domain in SPECIALISTS:
        rows = {domain: corpus[domain, "train"]}
        for name, regime in regimes.items():
            if (out / name / domain).exists():
                continue
            model.load_state_dict(start)
            batches = Batches(rows, {domain: 1.0}, device, options.seed + 1)
            found: dict[str, Any] = train(model, batches, regime)
            found["moved"] = moved(model, start)
            record["training"][f"{name}/{domain}"] = found
            print(name, domain, found, flush=True)
            save(model, out / name / domain, tokenizer_file)
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--size", default="large", choices=SIZES)
    parser.add_argument("--architecture", default="olmoe", choices=("olmoe", "qwen3_moe"))
    parser.add_argument("--regime", action="append", choices=REGIMES, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-scale", type=float, default=1.0, help="factor on all steps")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calibration-rows", type=int, default=400)
    parser.add_argument(
        "--more-text", action="store_true", help="take an eighth of the packages for calibration"
    )
    parser.add_argument("--test-tokens", type=int, default=200_000)


def main(options: argparse.Namespace) -> int:
    make_set(options.corpus, options.out, options)
    return 0
