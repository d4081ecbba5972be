"""The files beside the weights, and vocabularies that differ."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moemerge
import zoo
from moemerge.errors import TokenizerError

WORDS = ("alpha", "beta", "gamma", "delta")


@pytest.fixture
def models(tmp_path):
    """Two dense models: the second has two words more, and rows for them."""
    folders = []
    for seed, words in ((0, WORDS[:2]), (1, WORDS)):
        folder = tmp_path / f"m{seed}"
        zoo.tiny_tokenizer(folder, extra_words=words, chat_template=bool(seed))
        size = len(AutoTokenizer.from_pretrained(folder))
        zoo.dense_llama(folder, seed=seed, vocab=size)
        folders.append(folder)
    return folders


def linear(models, **extra):
    entries = [{"model": str(m), "parameters": {"weight": 1.0}} for m in models]
    return {"merge_method": "linear", "models": entries, **extra}


def test_unlike_vocabularies_need_a_word(models, tmp_path):
    with pytest.raises(TokenizerError, match="tokenizer_source"):
        moemerge.merge(linear(models), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_union_keeps_every_token_with_its_row(models, tmp_path):
    moemerge.merge(linear(models, tokenizer_source="union"), tmp_path / "out")
    tokenizers = [AutoTokenizer.from_pretrained(m).get_vocab() for m in models]
    merged = AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert merged.keys() == tokenizers[0].keys() | tokenizers[1].keys()
    name = "model.embed_tokens.weight"
    rows = zoo.tensors(tmp_path / "out")[name]
    own = [zoo.tensors(m)[name] for m in models]
    for token, index in merged.items():
        have = [e[v[token]] for e, v in zip(own, tokenizers, strict=True) if token in v]
        torch.testing.assert_close(rows[index], sum(have) / len(have))
    assert zoo.read_config(tmp_path / "out")["vocab_size"] == rows.shape[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_tokenizer_of_a_model_and_padding(models, tmp_path):
    settings = {"source": str(models[0]), "pad_to_multiple_of": 64}
    moemerge.merge(linear(models, tokenizer=settings), tmp_path / "out")
    assert zoo.read_config(tmp_path / "out")["vocab_size"] % 64 == 0
    merged = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert merged.get_vocab() == AutoTokenizer.from_pretrained(models[0]).get_vocab()


def test_a_tokenizer_may_come_from_outside_the_merge(models, tmp_path):
    other = tmp_path / "other"
    zoo.tiny_tokenizer(other, extra_words=WORDS)
    moemerge.merge(linear([models[1]], tokenizer_source=str(other)), tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(
        AutoTokenizer.from_pretrained(other)
    )


def test_chat_template_is_written_where_transformers_looks(models, tmp_path):
    moemerge.merge(linear([models[0]], chat_template="chatml"), tmp_path / "chatml")
    merged = AutoTokenizer.from_pretrained(tmp_path / "chatml")
    text = merged.apply_chat_template([{"role": "user", "content": "the code"}], tokenize=False)
    assert text.startswith("<|im_start|>user")
    moemerge.merge(
        linear(models, tokenizer_source="union", chat_template="auto"), tmp_path / "auto"
    )
    merged = AutoTokenizer.from_pretrained(tmp_path / "auto")
    assert merged.chat_template == AutoTokenizer.from_pretrained(models[1]).chat_template


def test_companions_are_carried_over(models, tmp_path):
    (models[1] / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (models[1] / "LICENSE").write_text("free")
    (models[1] / "optimizer.pt").write_text("not me")
    (models[1] / "README.md").write_text("not me either")
    moemerge.merge(linear([models[1]]), tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "LICENSE", "config.json"} <= names
    assert "optimizer.pt" not in names
    assert "not me" not in (tmp_path / "out" / "README.md").read_text()


def test_lora_inputs_are_merged_in(tmp_path, zoo_folder):
    """`model+lora` gives what PEFT's own merge gives."""
    from peft import LoraConfig, get_peft_model

    base = zoo_folder("olmoe")
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(0)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    tuned = get_peft_model(model, config)
    tuned.save_pretrained(tmp_path / "lora")
    tuned.merge_and_unload().save_pretrained(tmp_path / "whole")
    moemerge.merge(linear([f"{base}+{tmp_path / 'lora'}"]), tmp_path / "out")
    merged, expected = zoo.tensors(tmp_path / "out"), zoo.tensors(tmp_path / "whole")
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-4, atol=1e-5, msg=name)
