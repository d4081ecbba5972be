"""Checkpoints and text at a real model's shape, made on the spot: random weights, real files.

A layer is drawn on the GPU (where there is one) and written as a shard of its own, so never more
than a layer is in memory. Sources differ from the merged model in their routers; nothing else of
them is read, so the rest of their files is holes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint import Checkpoint, TensorInfo
from moemerge.checkpoint.safetensors_file import build_header
from moemerge.checkpoint.tensors import as_bytes

ROUTER_NOISE = 0.3
WRITERS = max(4, (os.cpu_count() or 4) - 4)
READERS = 8
BLOCK_BYTES = 16 * 2**20
SPECIAL = ("<pad>", "<eos>", "<unk>")


@dataclass(frozen=True)
class Shape:
    """A model's measures, by the names that this benchmark gives them."""

    family: str
    layers: int
    width: int
    experts: int
    top_k: int
    expert_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def config(self) -> dict[str, Any]:
        common = {
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "vocab_size": self.vocabulary,
            "pad_token_id": SPECIAL.index("<pad>"),
            "eos_token_id": SPECIAL.index("<eos>"),
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        if self.family == "llama":
            del common["num_experts"], common["num_experts_per_tok"]
            return common | {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "intermediate_size": self.expert_width,
                "max_position_embeddings": 4096,
            }
        if self.family == "olmoe":
            return common | {
                "architectures": ["OlmoeForCausalLM"],
                "model_type": "olmoe",
                "intermediate_size": self.expert_width,
                "max_position_embeddings": 4096,
            }
        return common | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 3 * self.width,
            "moe_intermediate_size": self.expert_width,
            "head_dim": self.head_dim,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        }

    def layer(self, number: int) -> Iterator[TensorInfo]:
        p, d, inner = f"model.layers.{number}.", self.width, self.heads * self.head_dim
        pairs = self.kv_heads * self.head_dim
        yield _info(f"{p}self_attn.q_proj.weight", inner, d)
        yield _info(f"{p}self_attn.k_proj.weight", pairs, d)
        yield _info(f"{p}self_attn.v_proj.weight", pairs, d)
        yield _info(f"{p}self_attn.o_proj.weight", d, inner)
        yield _info(f"{p}input_layernorm.weight", d)
        yield _info(f"{p}post_attention_layernorm.weight", d)
        if self.family == "llama":  # dense
            yield _info(f"{p}mlp.gate_proj.weight", self.expert_width, d)
            yield _info(f"{p}mlp.up_proj.weight", self.expert_width, d)
            yield _info(f"{p}mlp.down_proj.weight", d, self.expert_width)
            return
        # OLMoE norms all heads at once, Qwen3 each.
        whole = self.family == "olmoe"
        yield _info(f"{p}self_attn.q_norm.weight", inner if whole else self.head_dim)
        yield _info(f"{p}self_attn.k_norm.weight", pairs if whole else self.head_dim)
        yield _info(f"{p}mlp.gate.weight", self.experts, d)
        for e in range(self.experts):
            yield _info(f"{p}mlp.experts.{e}.gate_proj.weight", self.expert_width, d)
            yield _info(f"{p}mlp.experts.{e}.up_proj.weight", self.expert_width, d)
            yield _info(f"{p}mlp.experts.{e}.down_proj.weight", d, self.expert_width)

    def rest(self) -> Iterator[TensorInfo]:
        yield _info("model.embed_tokens.weight", self.vocabulary, self.width)
        yield _info("model.norm.weight", self.width)
        yield _info("lm_head.weight", self.vocabulary, self.width)


SHAPES = {
    "olmoe-1b-7b": Shape("olmoe", 16, 2048, 64, 8, 1024, 16, 16, 128, 50304),
    "qwen3-30b-a3b": Shape("qwen3_moe", 48, 2048, 128, 8, 768, 32, 4, 128, 151936),
    "llama-7gb": Shape("llama", 16, 4096, 1, 1, 11008, 32, 32, 128, 32000),
    "small": Shape("olmoe", 3, 256, 16, 4, 128, 4, 4, 64, 1024),
    "narrow": Shape("olmoe", 2, 64, 64, 8, 32, 2, 2, 32, 1024),
}


def _info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo.of(name, torch.bfloat16, shape)


# --- weights ------------------------------------------------------------------------------------


def make_model(folder: Path, shape: Shape, device: torch.device) -> int:
    """Write the merged model; gives its bytes. A folder that is there already is kept."""
    parts = [list(shape.rest()), *(list(shape.layer(n)) for n in range(shape.layers))]
    names = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n, _ in enumerate(parts, start=1)]
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator(device).manual_seed(0)
        largest = max(sum(info.nbytes for info in infos) for infos in parts)
        host = torch.empty(largest, dtype=torch.uint8, pin_memory=device.type == "cuda")
        with ThreadPoolExecutor(WRITERS) as pool:
            for name, infos in zip(names, parts, strict=True):
                _write_shard(folder / name, infos, generator, host, pool)
        weights = {info.name: n for n, infos in zip(names, parts, strict=True) for info in infos}
        index = {"metadata": {}, "weight_map": weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        make_tokenizer(shape.vocabulary, folder)
        (folder / "config.json").write_text(json.dumps(shape.config))
    return sum((folder / name).stat().st_size for name in names)


def _write_shard(
    path: Path,
    infos: list[TensorInfo],
    generator: torch.Generator,
    host: Tensor,
    pool: ThreadPoolExecutor,
) -> None:
    header, offsets = build_header(infos)
    total = sum(info.nbytes for info in infos)
    drawn = torch.empty(total // 2, dtype=torch.bfloat16, device=generator.device)
    drawn.normal_(generator=generator)
    for info in infos:
        at = (offsets[info.name] - len(header)) // 2
        part = drawn[at : at + info.nbytes // 2]
        # Unit gain, so that hidden states keep their size from layer to layer.
        part.fill_(1.0) if len(info.shape) == 1 else part.mul_(info.shape[-1] ** -0.5)
    write_file(path, header, host[:total].copy_(drawn.view(torch.uint8)), pool)


def write_file(path: Path, header: bytes, content: Tensor, pool: ThreadPoolExecutor) -> None:
    """Write a safetensors file; `content` is bytes in host memory."""
    with open(path, "wb") as file:
        file.write(header)
        file.flush()
        data = as_bytes(content)
        file.truncate(len(header) + len(data))
        blocks = range(0, len(data), BLOCK_BYTES)
        list(pool.map(lambda at: _pwrite(file.fileno(), data, at, len(header)), blocks))


def _pwrite(fd: int, data: memoryview, at: int, start: int) -> None:
    block, done = data[at : at + BLOCK_BYTES], 0
    while done < len(block):
        done += os.pwrite(fd, block[done:], start + at + done)


def make_source(folder: Path, merged: Path, seed: int) -> None:
    """A model whose routers are the merged ones plus noise; all else is never read."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    source = Checkpoint.open(merged)
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(merged.iterdir()):
        target = folder / file.name
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target)
            continue
        with open(file, "rb") as stored, open(target, "wb") as sparse:
            length = int.from_bytes(stored.read(8), "little")
            stored.seek(0)
            header = stored.read(8 + length)
            sparse.write(header)
            sparse.truncate(file.stat().st_size)
            for name, entry in json.loads(header[8:]).items():
                if name.endswith("mlp.gate.weight"):
                    router = source.read(name).float()
                    noise = torch.randn(router.shape, generator=generator)
                    moved = (router + ROUTER_NOISE * router.std() * noise).bfloat16()
                    sparse.seek(8 + length + entry["data_offsets"][0])
                    sparse.write(as_bytes(moved))


# --- text ---------------------------------------------------------------------------------------


def make_tokenizer(vocabulary: int, folder: Path) -> None:
    """One token for each word `wN`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = (*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), vocabulary)))
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Callable[..., Any] = PreTrainedTokenizerFast
    made = make(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.save_pretrained(folder)


def make_text(path: Path, tokens: int, row_tokens: int, words: range, seed: int) -> None:
    """Rows of random words of a part of the vocabulary."""
    if path.exists():
        return
    chance = random.Random(seed)
    with open(path, "w") as file:
        for begin in range(0, tokens, row_tokens):
            row = chance.choices(words, k=min(row_tokens, tokens - begin))
            file.write(json.dumps({"text": " ".join(f"w{n}" for n in row)}) + "\n")


def domains(vocabulary: int) -> dict[str, range]:
    """Each domain's words: half of the vocabulary."""
    middle = vocabulary // 2
    return {"math": range(len(SPECIAL), middle), "code": range(middle, vocabulary)}


# --- floors -------------------------------------------------------------------------------------


def read_rate(folder: Path, nbytes: int = 4 * 10**9) -> float:
    """Bytes per second at which the model's shards come into memory, with several readers."""
    import time

    jobs: list[tuple[Path, int]] = []
    for file in sorted(folder.glob("*.safetensors")):
        size = min(file.stat().st_size, nbytes - len(jobs) * BLOCK_BYTES)
        jobs += [(file, at) for at in range(0, max(size, 0), BLOCK_BYTES)]
    buffers = torch.zeros(4 * READERS, BLOCK_BYTES, dtype=torch.uint8)

    def read(job: tuple[int, tuple[Path, int]]) -> int:
        number, (file, at) = job
        fd = os.open(file, os.O_RDONLY)
        try:
            return os.preadv(fd, [as_bytes(buffers[number % len(buffers)])], at)
        finally:
            os.close(fd)

    begin = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        total = sum(pool.map(read, enumerate(jobs)))
    return total / (time.perf_counter() - begin)


def matrix_rate(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """FLOP per second of a large product on random data, in the dtype that jobs compute in."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that a reduction over a large tensor reads."""
    x: Tensor = torch.randn((2**30 if device.type == "cuda" else 2**24), device=device)
    return x.numel() * x.element_size() / _seconds(lambda: x.sum(), device)


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    import time

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        work()
    found = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - begin)
    return sorted(found)[len(found) // 2]
