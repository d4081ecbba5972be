"""Large MoE models on paper: files of holes, and estimates of bytes, time and memory.

    python -m tools.scale holes deepseek-v3 FOLDER      a checkpoint whose data is a hole
    python -m tools.scale table                         the tables of docs/scale.md

A file of holes has the header and the size of the real one, reads as zeros and takes no disk space.
The rates of the estimates are in docs/data/scale.json, with the runs that they are compared with.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moemerge.checkpoint.safetensors_file import build_header
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.runtime.dtypes import Dtype

BF16, F32, FP8, U8 = Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT8_E4M3FN, Dtype.UINT8
BLOCK = 128  # rows and columns that share a scale in block FP8
SHARD_BYTES = 4_300_000_000


@dataclass(frozen=True)
class Shape:
    """Sizes of a published MoE model."""

    model_type: str
    layers: int
    hidden: int
    experts: int
    top_k: int
    expert_width: int
    heads: int
    vocabulary: int
    dense_layers: int = 0
    dense_width: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    extra_layers: int = 0  # multi-token prediction

    def tensors(self) -> Iterator[TensorInfo]:
        yield _plain("model.embed_tokens.weight", self.vocabulary, self.hidden)
        for layer in range(self.layers + self.extra_layers):
            prefix = f"model.layers.{layer}."
            yield _plain(prefix + "input_layernorm.weight", self.hidden)
            yield _plain(prefix + "post_attention_layernorm.weight", self.hidden)
            if self.model_type in ("deepseek_v3", "kimi_k2"):
                yield from self._deepseek_layer(layer, prefix)
            elif self.model_type in ("qwen3_moe", "olmoe"):
                yield from self._qwen_layer(prefix)
            else:
                yield from self._gpt_oss_layer(prefix)
        yield _plain("model.norm.weight", self.hidden)
        yield _plain("lm_head.weight", self.vocabulary, self.hidden)

    def _deepseek_layer(self, layer: int, prefix: str) -> Iterator[TensorInfo]:
        attention, hidden, heads = prefix + "self_attn.", self.hidden, self.heads
        yield from _block_fp8(attention + "q_a_proj.weight", 1536, hidden)
        yield _plain(attention + "q_a_layernorm.weight", 1536)
        yield from _block_fp8(attention + "q_b_proj.weight", heads * 192, 1536)
        yield from _block_fp8(attention + "kv_a_proj_with_mqa.weight", 576, hidden)
        yield _plain(attention + "kv_a_layernorm.weight", 512)
        yield from _block_fp8(attention + "kv_b_proj.weight", heads * 256, 512)
        yield from _block_fp8(attention + "o_proj.weight", hidden, heads * 128)
        mlp = prefix + "mlp."
        if layer < self.dense_layers:
            yield from self._mlp(mlp, self.dense_width)
            return
        yield _plain(mlp + "gate.weight", self.experts, hidden)
        yield TensorInfo.of(mlp + "gate.e_score_correction_bias", F32, (self.experts,))
        yield from self._mlp(mlp + "shared_experts.", self.expert_width)
        for expert in range(self.experts):
            yield from self._mlp(f"{mlp}experts.{expert}.", self.expert_width)
        if layer >= self.layers:
            yield _plain(prefix + "embed_tokens.weight", self.vocabulary, hidden)
            yield _plain(prefix + "eh_proj.weight", hidden, 2 * hidden)
            yield _plain(prefix + "shared_head.head.weight", self.vocabulary, hidden)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield _plain(f"{prefix}{norm}.weight", hidden)

    def _mlp(self, prefix: str, width: int) -> Iterator[TensorInfo]:
        yield from _block_fp8(prefix + "gate_proj.weight", width, self.hidden)
        yield from _block_fp8(prefix + "up_proj.weight", width, self.hidden)
        yield from _block_fp8(prefix + "down_proj.weight", self.hidden, width)

    def _qwen_layer(self, prefix: str) -> Iterator[TensorInfo]:
        attention, hidden, width = prefix + "self_attn.", self.hidden, self.expert_width
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield _plain(attention + "q_proj.weight", queries, hidden)
        yield _plain(attention + "k_proj.weight", keys, hidden)
        yield _plain(attention + "v_proj.weight", keys, hidden)
        yield _plain(attention + "o_proj.weight", hidden, queries)
        yield _plain(attention + "q_norm.weight", self.head_dim)
        yield _plain(attention + "k_norm.weight", self.head_dim)
        yield _plain(prefix + "mlp.gate.weight", self.experts, hidden)
        for expert in range(self.experts):
            mlp = f"{prefix}mlp.experts.{expert}."
            yield _plain(mlp + "gate_proj.weight", width, hidden)
            yield _plain(mlp + "up_proj.weight", width, hidden)
            yield _plain(mlp + "down_proj.weight", hidden, width)

    def _gpt_oss_layer(self, prefix: str) -> Iterator[TensorInfo]:
        attention, hidden, width = prefix + "self_attn.", self.hidden, self.expert_width
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, rows, columns in (
            ("q_proj", queries, hidden),
            ("k_proj", keys, hidden),
            ("v_proj", keys, hidden),
            ("o_proj", hidden, queries),
        ):
            yield _plain(f"{attention}{name}.weight", rows, columns)
            yield _plain(f"{attention}{name}.bias", rows)
        yield _plain(attention + "sinks", self.heads)
        yield _plain(prefix + "mlp.router.weight", self.experts, hidden)
        yield _plain(prefix + "mlp.router.bias", self.experts)
        for name, rows, columns in (
            ("gate_up_proj", 2 * width, hidden),
            ("down_proj", hidden, width),
        ):
            stack = f"{prefix}mlp.experts.{name}"
            groups = columns // 32  # 32 values of four bits and an exponent
            yield TensorInfo.of(f"{stack}_blocks", U8, (self.experts, rows, groups, 16))
            yield TensorInfo.of(f"{stack}_scales", U8, (self.experts, rows, groups))
            yield _plain(f"{stack}_bias", self.experts, rows)

    @property
    def config(self) -> dict[str, Any]:
        common = {
            "model_type": self.model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_experts_per_tok": self.top_k,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        if self.model_type == "qwen3_moe":
            return common | {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": self.experts,
                "moe_intermediate_size": self.expert_width,
                "intermediate_size": 3 * self.hidden,
                "head_dim": self.head_dim,
                "norm_topk_prob": True,
            }
        if self.model_type == "gpt_oss":
            return common | {
                "architectures": ["GptOssForCausalLM"],
                "num_local_experts": self.experts,
                "intermediate_size": self.expert_width,
                "head_dim": self.head_dim,
                "quantization_config": {"quant_method": "mxfp4"},
            }
        return common | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "moe_intermediate_size": self.expert_width,
            "intermediate_size": self.dense_width,
            "first_k_dense_replace": self.dense_layers,
            "num_nextn_predict_layers": self.extra_layers,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_group": 8 if self.extra_layers else 1,
            "topk_group": 4 if self.extra_layers else 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            },
        }


SHAPES = {
    "deepseek-v3": Shape(
        "deepseek_v3", 61, 7168, 256, 8, 2048, 128, 129280, 3, 18432, extra_layers=1
    ),
    "kimi-k2": Shape("kimi_k2", 61, 7168, 384, 8, 2048, 64, 163840, 1, 18432),
    "qwen3-235b-a22b": Shape(
        "qwen3_moe", 94, 4096, 128, 8, 1536, 64, 151936, kv_heads=4, head_dim=128
    ),
    "gpt-oss-120b": Shape("gpt_oss", 36, 2880, 128, 4, 2880, 64, 201088, kv_heads=8, head_dim=64),
}


# Measured shapes, with which the estimates are compared.
MEASURED = {
    "olmoe-1b-7b": Shape("olmoe", 16, 2048, 64, 8, 1024, 16, 50304, kv_heads=16, head_dim=128),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe", 48, 2048, 128, 8, 768, 32, 151936, kv_heads=4, head_dim=128
    ),
    "deepseek-v3, two layers": replace(
        SHAPES["deepseek-v3"], layers=2, dense_layers=0, extra_layers=0, vocabulary=8192
    ),
}


def _plain(name: str, *shape: int) -> TensorInfo:
    return TensorInfo.of(name, BF16, shape)


def _block_fp8(name: str, rows: int, columns: int) -> Iterator[TensorInfo]:
    yield TensorInfo.of(name, FP8, (rows, columns))
    yield TensorInfo.of(f"{name}_scale_inv", F32, (-(-rows // BLOCK), -(-columns // BLOCK)))


def make_holes(shape: Shape, folder: Path) -> None:
    """Write a checkpoint of the shape whose tensors are holes."""
    shards: list[list[TensorInfo]] = [[]]
    filled = 0
    for info in shape.tensors():
        if filled + info.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(info)
        filled += info.nbytes
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, infos in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        header, _ = build_header(infos)
        with open(folder / name, "wb") as file:
            file.write(header)
            file.flush()
            os.truncate(file.fileno(), len(header) + sum(info.nbytes for info in infos))
        weight_map |= dict.fromkeys((info.name for info in infos), name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(shape.config))


# --- estimates ------------------------------------------------------------------------------------

GPU_BYTES = 133e9  # of an H200, as far as a job uses them
# Of a refit: states of a token per unit of width, and the sums of its maps per width².
STATE_BYTES = 24
SUM_BYTES = 580
RATES = Path(__file__).parents[1] / "docs" / "data" / "scale.json"
GB = 10**9


@dataclass(frozen=True)
class Size:
    """Bytes on disk and in bf16, and parameters that one token uses."""

    stored: int
    plain: int
    parameters: int
    active: int
    moe_layers: int
    expert: int  # parameters of one expert

    @classmethod
    def of(cls, shape: Shape) -> Size:
        stored = parameters = routed = 0
        for info in shape.tensors():
            stored += info.nbytes
            if info.name.endswith(("_scale_inv", "_scales")):
                continue
            count = info.nbytes // info.dtype.itemsize * (2 if info.dtype is U8 else 1)
            parameters += count
            routed += count if ".experts." in info.name else 0
        idle = routed - routed * shape.top_k // shape.experts
        layers = shape.layers + shape.extra_layers - shape.dense_layers
        each = routed // (layers * shape.experts)
        return cls(stored, 2 * parameters, parameters, parameters - idle, layers, each)


@dataclass(frozen=True)
class Estimate:
    """Seconds of the jobs with one base and two fine-tunes, by the rates of `RATES`."""

    shape: Shape
    size: Size
    rates: dict[str, float]

    @classmethod
    def of(cls, shape: Shape) -> Estimate:
        return cls(shape, Size.of(shape), json.loads(RATES.read_text())["rates"])

    def merge(self, method: str, cores: int, disk: float) -> float:
        """Return the seconds of a merge: computing overlaps reading and writing."""
        quantised = "_fp8" if self.size.stored < 0.9 * self.size.plain else ""
        work = self.rates[f"{method}{quantised}_core_seconds_per_gb"] * self.size.plain / GB / cores
        moved = (3 * self.size.stored + self.size.plain) / disk
        return self.rates["merge_start_seconds"] + max(work, moved)

    def calibrate(self, tokens: int, gpus: int = 1) -> float:
        """Return the seconds of a calibration of the merge, which is read once."""
        flops = 2 * self.size.active * tokens
        read = self.size.stored / self.rates["read_bytes_per_second"]
        return read + flops / self.rates["calibrate_flops"] / gpus

    def refit(self, tokens: int, gpus: int = 1) -> float:
        """Return the seconds of a refit of all maps.

        Reading three models overlaps computing if a GPU can hold two layers of each.
        """
        shape, rates = self.shape, self.rates
        forward = 3 * 2 * self.size.active * tokens / rates["refit_forward_flops"]
        experts = self.size.moe_layers * shape.experts
        rows = tokens * shape.top_k / shape.experts  # tokens of one expert
        gram = 2 * rows * (shape.hidden**2 + shape.expert_width**2)
        gate_up = _solution(shape.hidden, 2 * shape.expert_width)
        products = gram + gate_up + _solution(shape.expert_width, shape.hidden)
        solve = experts * (rates["refit_expert_seconds"] + products / rates["refit_gram_flops"])
        layers = shape.layers * rates["refit_layer_seconds"]
        read = 3 * self.size.stored / rates["read_bytes_per_second"]
        start = rates["refit_start_seconds"] + rates["refit_seconds_per_gb"] * self.size.stored / GB
        work = (forward + solve + layers) / gpus
        overlaps = self.refit_bytes(tokens, gpus, layers=2) < GPU_BYTES
        return start + (max(read, work) if overlaps else read + work)

    def refit_bytes(self, tokens: int, gpus: int = 1, *, layers: int = 1) -> float:
        """Return the memory of a GPU that holds these layers of three models in bf16."""
        width = self.shape.hidden
        weights = layers * 3 * self.size.plain / self.shape.layers
        return weights + STATE_BYTES * tokens / gpus * width + SUM_BYTES * width**2

    @property
    def layer_bytes(self) -> int:
        """Return the bf16 bytes of one layer's experts, the most that a job needs at once."""
        return 2 * self.shape.experts * self.size.expert


def _solution(inputs: int, outputs: int) -> float:
    """Return the FLOPs of a map's solution: factorise, solve, compute two errors."""
    return inputs**3 / 3 + 6 * inputs**2 * outputs


def estimates() -> Iterator[list[str]]:
    """Yield the rows of the table of estimates."""
    for name, shape in SHAPES.items():
        e = Estimate.of(shape)
        yield [
            name,
            f"{e.size.parameters / GB:.0f}, {e.size.active / GB:.0f}",
            f"{e.size.stored / GB:.0f}",
            f"{(3 * e.size.stored + e.size.plain) / GB:.0f}",
            _minutes(e.merge("ties", 16, MERGE_DISK)),
            _minutes(e.calibrate(TOKENS)),
            _minutes(e.calibrate(TOKENS, 8)),
            *(
                _minutes(e.refit(TOKENS, gpus))
                if e.refit_bytes(TOKENS, gpus) < GPU_BYTES
                else "too large"
                for gpus in (1, 8)
            ),
            f"{e.layer_bytes / GB:.1f}",
        ]


TOKENS = 10**6
MERGE_DISK = 2.5 * GB
HEADINGS = (
    "model",
    "parameters, active (B)",
    "stored, GB",
    "merge moves, GB",
    "merge (`ties`)",
    "calibrate",
    "8 GPUs",
    "refit",
    "8 GPUs",
    "experts of a layer, GB",
)


def checks() -> Iterator[list[str]]:
    """Yield the rows of the table of measured runs."""
    for run in json.loads(RATES.read_text())["checks"]:
        estimate = Estimate.of(MEASURED[run["shape"]])
        got = getattr(estimate, run["job"])(run["tokens"])
        error = got / run["seconds"] - 1
        tokens = f"{run['tokens'] / 1e6:g} M"
        measured = f"{run['seconds']:.1f} s"
        what = "rates" if run["used"] else "check"
        yield [run["job"], run["shape"], tokens, measured, f"{got:.1f} s", f"{error:+.0%}", what]


CHECK_HEADINGS = ("job", "shape", "tokens", "measured", "estimate", "error", "used for")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 600 else f"{seconds / 60:.0f} min"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    holes = commands.add_parser("holes")
    holes.add_argument("shape", choices=list(SHAPES))
    holes.add_argument("folder", type=Path)
    commands.add_parser("table")
    args = parser.parse_args()
    if args.command == "holes":
        make_holes(SHAPES[args.shape], args.folder)
    else:
        print(table(HEADINGS, estimates()), table(CHECK_HEADINGS, checks()), sep="\n\n")


if __name__ == "__main__":
    main()
