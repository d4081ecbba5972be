"""The tests' own checkpoints: deterministic, loadable, different where they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import zoo


@pytest.mark.parametrize("model_type", ["olmoe", "deepseek_v4", "gpt_oss"])
def test_same_seed_same_bytes(
    zoo_folder: Callable[..., Path], tmp_path: Path, model_type: str
) -> None:
    first = zoo.tensors(zoo_folder(model_type))
    again = zoo.tensors(zoo.build(model_type, tmp_path / "again"))
    other = zoo.tensors(zoo_folder(model_type, seed=1))
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    floats = [name for name in first if first[name].is_floating_point()]
    assert all(first[n].shape == other[n].shape for n in first)
    assert not any(torch.equal(first[name], other[name]) for name in floats)


def test_perturb_moves_floats_only(zoo_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = zoo_folder("deepseek_v4")
    moved = zoo.tensors(zoo.perturb(folder, tmp_path / "tuned", seed=1, scale=0.1))
    for name, value in zoo.tensors(folder).items():
        if not value.is_floating_point():
            assert torch.equal(moved[name], value)
        elif value.numel() >= 32:
            change = (moved[name] - value).norm() / value.norm()
            assert 0.05 < change < 0.2
    assert (tmp_path / "tuned" / "config.json").exists()


@pytest.mark.parametrize(("qwen", "tied"), [(False, False), (True, True)])
def test_dense_llama(tmp_path: Path, qwen: bool, tied: bool) -> None:
    folder = zoo.dense_llama(tmp_path, qwen=qwen, tied=tied)
    names = zoo.tensors(folder)
    assert ("lm_head.weight" in names) != tied
    assert ("model.layers.0.self_attn.q_proj.bias" in names) == qwen
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 4


def test_tokenizer(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        zoo.tiny_tokenizer(tmp_path, chat_template=True, extra_words=("zebra",))
    )
    assert len(tokenizer) <= zoo.VOCAB
    ids = tokenizer("two plus zebra")["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert ids[0] == tokenizer.bos_token_id
    text = tokenizer.apply_chat_template([{"role": "user", "content": "what is x"}], tokenize=False)
    assert text == "<|user|> what is x<|end|>"
    plain = transformers.AutoTokenizer.from_pretrained(zoo.tiny_tokenizer(tmp_path / "plain"))
    assert plain.chat_template is None
