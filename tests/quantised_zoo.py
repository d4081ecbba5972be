"""Checkpoints as they are published: quantised copies of plain ones, written without our own code.

The simplest arithmetic there is, in float64 and one matrix at a time; what it means to be each
format is said by transformers and compressed-tensors, which the tests ask as well.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import zoo

Parts = dict[str, Tensor]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Quantise = Callable[[str, Tensor], Parts]


def is_weight(name: str, tensor: Tensor) -> bool:
    """What publishers quantise: matrices of attention and feed-forward layers, no routers."""
    return tensor.dim() >= 2 and bool(re.search(r"_proj(?!_bias)|\.w[123]\.", name))


def blocks(tensor: Tensor, height: int, width: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(down, height, across, width), filled up with zeros, and the way back."""
    rows, columns = tensor.shape
    down, across = -(-rows // height), -(-columns // width)
    padded = torch.zeros(down * height, across * width, dtype=torch.float64)
    padded[:rows, :columns] = tensor.double()

    def back(values: Tensor) -> Tensor:
        return values.reshape(down * height, across * width)[:rows, :columns].contiguous()

    return padded.view(down, height, across, width), back


def block_fp8(
    height: int, width: int, scale_dtype: torch.dtype = torch.float32, powers: bool = False
) -> Quantise:
    """`X.weight` and `X.weight_scale_inv`."""

    def one(tensor: Tensor) -> tuple[Tensor, Tensor]:
        grid, back = blocks(tensor, height, width)
        scale = grid.abs().amax((1, 3)) / 448
        scale = torch.where(scale > 0, scale, 1.0)
        if powers:
            scale = 2.0 ** scale.log2().ceil()
        stored = scale.to(scale_dtype)
        codes = back(grid / stored.double()[:, None, :, None]).float().clamp(-448, 448)
        return codes.to(torch.float8_e4m3fn), stored

    def parts(name: str, tensor: Tensor) -> Parts:
        if tensor.dim() == 2:
            codes, scale = one(tensor)
            return {name: codes, name + "_scale_inv": scale}
        made = [one(matrix) for matrix in tensor]
        return {
            name: torch.stack([codes for codes, _ in made]),
            name + "_scale_inv": torch.stack([scale for _, scale in made]),
        }

    return parts


def mxfp4(name: str, tensor: Tensor) -> Parts:
    """`X_blocks` and `X_scales` of a stack (experts, in, out)."""
    values = tensor.transpose(1, 2).double()  # (experts, out, in)
    groups = values.reshape(*values.shape[:2], -1, 32)
    exponent = (groups.abs().amax(-1) / 6).clamp(min=2.0**-100).log2().ceil()
    scaled = groups / 2.0 ** exponent[..., None]
    table = torch.tensor(FP4, dtype=torch.float64)
    codes = (scaled.abs()[..., None] - table).abs().argmin(-1) + 8 * torch.signbit(scaled)
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return {name + "_blocks": packed, name + "_scales": (exponent + 127).to(torch.uint8)}


def nvfp4(*, compressed: bool) -> Quantise:
    """ModelOpt: `X.weight`, `X.weight_scale` and `X.weight_scale_2`, and a static `X.input_scale`.

    compressed-tensors stores the inverse of the two numbers in float32.
    """

    def parts(name: str, tensor: Tensor) -> Parts:
        groups = tensor.double().view(len(tensor), -1, 16)
        factor = (groups.abs().max() / (6 * 448)).float()
        scale = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        scaled = groups / (scale.double() * factor)[..., None]
        table = torch.tensor(FP4, dtype=torch.float64)
        codes = (scaled.abs()[..., None] - table).abs().argmin(-1) + 8 * torch.signbit(scaled)
        codes = codes.view(tensor.shape).to(torch.uint8)
        packed = codes[:, 0::2] + 16 * codes[:, 1::2]
        stem = name.removesuffix("weight")
        if compressed:
            return {
                f"{stem}weight_packed": packed,
                f"{stem}weight_scale": scale,
                f"{stem}weight_global_scale": (1 / factor).view(1),
                f"{stem}input_global_scale": (2 / factor).view(1),
            }
        made = {name: packed, f"{stem}weight_scale": scale, f"{stem}weight_scale_2": factor}
        return made | {f"{stem}input_scale": factor.clone()}

    return parts


def fp8_scaled(strategy: str, scale_dtype: torch.dtype = torch.bfloat16) -> Quantise:
    """compressed-tensors: `X.weight` and `X.weight_scale`, one scale or one a row."""

    def parts(name: str, tensor: Tensor) -> Parts:
        largest = tensor.double().abs()
        largest = largest.amax().view(1) if strategy == "tensor" else largest.amax(1, keepdim=True)
        scale = (largest / 448).to(scale_dtype)
        codes = (tensor.double() / scale.double()).float().clamp(-448, 448)
        return {name: codes.to(torch.float8_e4m3fn), name + "_scale": scale}

    return parts


def packed(
    bits: int,
    group: int | None = None,
    *,
    zeros: bool = False,
    shuffled: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Quantise:
    """compressed-tensors: `X.weight_packed` and what goes with it; a group of None is a row."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def parts(name: str, tensor: Tensor) -> Parts:
        rows, columns = tensor.shape
        width = group or columns
        order = torch.arange(columns) // width
        if shuffled:
            order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
        place = torch.argsort(order, stable=True)
        grid = tensor.double()[:, place].view(rows, -1, width)
        least, most = grid.amin(-1).clamp(max=0), grid.amax(-1).clamp(min=0)
        zero = torch.zeros_like(least)
        if zeros:
            scale = ((most - least) / (high - low)).to(scale_dtype)
            zero = (low - least / scale.double()).clamp(low, high).round()
        else:
            scale = (torch.maximum(-least, most) / ((high - low) / 2)).to(scale_dtype)
        codes = (grid / scale.double()[..., None] + zero[..., None]).round().clamp(low, high)
        flat = torch.empty(rows, columns, dtype=torch.int64)
        flat[:, place] = codes.long().view(rows, columns)
        stem = name.removesuffix("weight")
        made = {
            f"{stem}weight_packed": words(flat - low, bits),
            f"{stem}weight_scale": scale,
            f"{stem}weight_shape": torch.tensor([rows, columns]),
        }
        if zeros:
            made[f"{stem}weight_zero_point"] = words((zero.long() - low).T, bits).T.contiguous()
        if shuffled:
            made[f"{stem}weight_g_idx"] = order.to(torch.int32)
        return made

    return parts


def words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes (rows, columns) side by side in words of 32 bits, the first lowest."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    shifts = torch.arange(each) * bits
    total = (codes.view(len(codes), -1, each) << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors with one group."""
    formats = {"float": "float-quantized", "int": "pack-quantized"}
    stated = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": formats[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": stated}},
        "ignore": ["lm_head", "re:.*router"],
    }


def fp8_config(height: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [height, width],
        **more,
    }


def convert(
    folder: Path,
    out: Path,
    section: Mapping[str, Any],
    quantise: Quantise,
    wanted: Callable[[str, Tensor], bool] = is_weight,
    *,
    shards: int = 1,
) -> Path:
    """A copy of a checkpoint with the wanted tensors quantised, in one file or several."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    made: Parts = {}
    for name, tensor in zoo.tensors(folder).items():
        made |= quantise(name, tensor) if wanted(name, tensor) else {name: tensor}
    save(made, out, shards)
    config = zoo.read_config(folder) | {"quantization_config": dict(section)}
    (out / "config.json").write_text(json.dumps(config))
    return out


def save(tensors: Parts, folder: Path, shards: int = 1) -> None:
    """Dealt out one by one, so that scales lie in other files than their weights."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= {key: name for key in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def is_stack(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 3 and is_weight(name, tensor)


class Kind:
    """One published form: the family that is published so, and what it takes to make it."""

    def __init__(
        self,
        family: str,
        section: Mapping[str, Any],
        quantise: Quantise,
        wanted: Callable[[str, Tensor], bool] = is_weight,
        **sizes: Any,
    ) -> None:
        self.family, self.section, self.quantise = family, section, quantise
        self.wanted, self.sizes = wanted, sizes

    def publish(self, folder: Path, out: Path, **options: Any) -> Path:
        return convert(folder, out, self.section, self.quantise, self.wanted, **options)


def llama4(name: str, tensor: Tensor) -> Parts:
    """FP8 with a scale a row; stacks (experts, in, out) as matrices of each expert."""
    quantise = fp8_scaled("channel")
    if tensor.dim() == 2:
        return quantise(name, tensor)
    made: Parts = {}
    owner, _, stack = name.rpartition(".")
    for expert, matrix in enumerate(tensor):
        projections = {"down_proj": matrix}
        if stack == "gate_up_proj":
            projections = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2, dim=1), strict=True))
        for projection, part in projections.items():
            made |= quantise(f"{owner}.{expert}.{projection}.weight", part.T)
    return made


INT4 = weights(4, "int", "group", group_size=8)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
NVFP4 = weights(4, "float", "tensor_group", group_size=16) | {"format": "nvfp4-pack-quantized"}
KINDS: dict[str, Kind] = {
    "deepseek fp8": Kind("deepseek_v3", fp8_config(8, 8), block_fp8(8, 8)),
    "qwen fp8": Kind("qwen3_moe", fp8_config(8, 8), block_fp8(8, 8)),
    "gpt-oss mxfp4": Kind(
        "gpt_oss", {"quant_method": "mxfp4"}, mxfp4, is_stack, hidden_size=64, intermediate_size=32
    ),
    "kimi int4": Kind("deepseek_v3", INT4, packed(4, 8)),
    "int4 with zeros": Kind(
        "qwen3_moe",
        weights(4, "int", "group", group_size=8, symmetric=False),
        packed(4, 8, zeros=True, shuffled=True),
    ),
    "fp8 a row": Kind("qwen3_moe", weights(8, "float", "channel"), fp8_scaled("channel")),
    "llama4 fp8 a row": Kind("llama4_text", weights(8, "float", "channel"), llama4),
    "fp8 a tensor": Kind("olmoe", weights(8, "float", "tensor"), fp8_scaled("tensor")),
    "int8 a row": Kind("olmoe", weights(8, "int", "channel"), packed(8)),
    "int4 a row": Kind(
        "olmoe", weights(4, "int", "channel", symmetric=False), packed(4, zeros=True)
    ),
    "nvfp4 modelopt": Kind(
        "qwen3_moe", MODELOPT, nvfp4(compressed=False), moe_intermediate_size=32
    ),
    "nvfp4 compressed": Kind("olmoe", NVFP4, nvfp4(compressed=True), intermediate_size=32),
}


def plain_copy(folder: Path, out: Path) -> Path:
    """The same model in plain floats, as it is read."""
    from moemerge.checkpoint import Checkpoint

    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    with Checkpoint.open(folder) as checkpoint:
        save({name: checkpoint[name] for name in checkpoint}, out)
        (out / "config.json").write_text(json.dumps(checkpoint.config))
    return out
