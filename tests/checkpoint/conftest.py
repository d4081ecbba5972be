"""Real, tiny model folders made on the fly."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file


def write_raw(path, header, data=b"", length=None):
    """A safetensors file whose header may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def sample_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(16, 8, generator=generator),
        "model.layers.0.mlp.gate.weight": torch.randn(4, 8, generator=generator).bfloat16(),
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 6, 8, generator=generator),
        "model.norm.weight": torch.ones(8, dtype=torch.float16),
        "counter": torch.tensor(7),
    }


@pytest.fixture
def make_folder(tmp_path):
    """make_folder(name, {file: tensors}, weight_map=..., config=...) -> folder."""

    def make(
        name="model",
        files=None,
        weight_map=None,
        config=None,
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = {"model_type": "olmoe"} if config is None else config
        (folder / "config.json").write_text(json.dumps(config))
        for file, tensors in (files or {"model.safetensors": sample_tensors()}).items():
            if file.endswith(".bin"):
                torch.save(dict(tensors), folder / file)
            else:
                save_file(dict(tensors), folder / file)
        if weight_map is not None:
            kind = "model.safetensors" if all_safetensors(weight_map) else "pytorch_model.bin"
            index = {"metadata": {}, "weight_map": dict(weight_map)}
            (folder / f"{kind}.index.json").write_text(json.dumps(index))
        return folder

    return make


def all_safetensors(weight_map):
    return not any(file.endswith(".bin") for file in weight_map.values())


@pytest.fixture
def sharded(make_folder):
    tensors = sample_tensors()
    names = list(tensors)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    files = {one: {n: tensors[n] for n in names[:2]}, two: {n: tensors[n] for n in names[2:]}}
    return make_folder("sharded", files, {n: f for f, ts in files.items() for n in ts})
