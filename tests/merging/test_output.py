"""The files beside the weights, and vocabularies that differ."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import moemerge
import zoo
from moemerge.errors import (
    ArchitectureError,
    CheckpointError,
    NumericalError,
    TokenizerError,
)
from zoo import linear, stacked

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


def test_positions_are_no_tokens(tmp_path):
    for seed, words in ((0, WORDS[:2]), (1, WORDS)):
        folder = zoo.tiny_tokenizer(tmp_path / f"m{seed}", extra_words=words)
        size = len(AutoTokenizer.from_pretrained(folder))
        small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
        GPT2LMHeadModel(GPT2Config(vocab_size=size, **small)).save_pretrained(folder)
    models = [tmp_path / "m0", tmp_path / "m1"]
    moemerge.merge(linear(models, tokenizer_source="union"), tmp_path / "out")
    name = "transformer.wpe.weight"
    expected = sum(zoo.tensors(m)[name] for m in models) / 2
    torch.testing.assert_close(zoo.tensors(tmp_path / "out")[name], expected)


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


def test_differing_templates_and_special_tokens_are_named(tmp_path):
    folders = [tmp_path / "m0", tmp_path / "m1"]
    for seed, folder in enumerate(folders):
        zoo.tiny_tokenizer(folder, chat_template=bool(seed))
        zoo.dense_llama(folder, seed=seed, vocab=len(AutoTokenizer.from_pretrained(folder)))

    def found(**extra):
        notices = moemerge.validate(linear(folders, **extra)).notices
        return [n for n in notices if "chat templates" in n or "special tokens" in n]

    (notice,) = found()
    assert "chat templates of m1 differ from those of m0, which has none" in notice
    assert found(chat_template="auto") == []
    path = folders[1] / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<pad>"}))
    assert "special tokens of m1 differ" in found(chat_template="auto")[0]
    path.write_text("{")
    assert any("could not be compared" in notice for notice in found())


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
    (models[1] / "generation_config.json").write_text("[]")  # transformers would fail
    with pytest.raises(CheckpointError, match=r"generation_config\.json holds a JSON list"):
        moemerge.validate(linear([models[1]]))


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


def resized(base, folder, words):
    """An adapter that brings a tokenizer with more words, and an embedding with rows for them."""
    zoo.tiny_tokenizer(folder, extra_words=words)
    size = len(AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(size)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {name: torch.randn(size, zoo.HIDDEN) for name in names}
    return f"{base}+{zoo.adapter(folder, weights)}", weights["model.embed_tokens.weight"]


@pytest.mark.parametrize("method", ["linear", "karcher"])
def test_adapters_may_bring_a_larger_vocabulary(models, tmp_path, method):
    one, rows1 = resized(models[0], tmp_path / "lora1", WORDS)
    two, rows2 = resized(models[0], tmp_path / "lora2", WORDS[:3])
    name = "model.embed_tokens.weight"
    config = {"merge_method": method, "models": [{"model": one}]}
    if method == "linear":
        config["parameters"] = {"weight": 1.0}
    moemerge.merge(config, tmp_path / "alone")
    torch.testing.assert_close(zoo.tensors(tmp_path / "alone")[name], rows1)
    assert zoo.read_config(tmp_path / "alone")["vocab_size"] == len(rows1)
    config = {**config, "models": [{"model": two}, {"model": one}], "tokenizer_source": "union"}
    moemerge.merge(config, tmp_path / "out")
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert set(WORDS) <= set(vocabulary)
    if method == "linear":
        own = [AutoTokenizer.from_pretrained(tmp_path / f"lora{i}").get_vocab() for i in (1, 2)]
        merged = zoo.tensors(tmp_path / "out")[name]
        index = vocabulary["gamma"]
        expected = (rows1[own[0]["gamma"]] + rows2[own[1]["gamma"]]) / 2
        torch.testing.assert_close(merged[index], expected)
        torch.testing.assert_close(merged[vocabulary["delta"]], rows1[own[0]["delta"]])


def test_an_adapter_is_never_overwritten(models, tmp_path):
    one, _ = resized(models[0], tmp_path / "lora", WORDS)
    with pytest.raises(CheckpointError, match="is the input folder"):
        moemerge.merge(linear([one]), tmp_path / "lora", overwrite=True)
    assert (tmp_path / "lora" / "adapter_model.safetensors").exists()


def test_the_card_does_not_count_the_base(models, tmp_path):
    base = shutil.copytree(models[0], tmp_path / "base")
    config = linear([models[0]], base_model=str(base)) | {"merge_method": "task_arithmetic"}
    report = moemerge.merge(config, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1 model merged with `task_arithmetic`" in card
    assert f"- `{base}` (base, the base)" in card
    assert [m.base for m in report.models] == [False, True]
    assert report.to_json()["inputs"]["base"]["base"] is True


def test_the_card_names_hub_models_alone(models, tmp_path):
    one, _ = resized(models[0], tmp_path / "lora", WORDS)
    moemerge.merge(linear([one]), tmp_path / "out")
    assert "base_model" not in (tmp_path / "out" / "README.md").read_text().split("---")[1]


def stack(model, *ranges):
    return stacked(*((model, layers) for layers in ranges))


def test_layer_numbers_in_a_config_follow_the_slices(tmp_path):
    """Which layers are dense is said by number: the result must say it of its own layers."""
    model = zoo.build("qwen3_moe", tmp_path / "m", num_hidden_layers=4, mlp_only_layers=[1])
    moemerge.merge(stack(model, (1, 3), (0, 2)), tmp_path / "out")
    assert zoo.read_config(tmp_path / "out")["mlp_only_layers"] == [0, 3]
    zoo.assert_loads(tmp_path / "out")


def test_a_count_of_half_layers_follows_the_slices(tmp_path):
    """LongCat-Flash may count its attentions besides, two in a layer."""
    model = zoo.build("longcat_flash", tmp_path / "m")
    layers = zoo.read_config(model)["num_layers"]
    zoo.edit_config(model, num_hidden_layers=2 * layers)
    moemerge.merge(stack(model, (0, layers), (layers - 1, layers)), tmp_path / "out")
    result = zoo.read_config(tmp_path / "out")
    assert (result["num_layers"], result["num_hidden_layers"]) == (layers + 1, 2 * layers + 2)
    zoo.assert_loads(tmp_path / "out")


def test_leading_dense_layers_stay_in_front(tmp_path):
    model = zoo.build("deepseek_v2", tmp_path / "m", num_hidden_layers=3, first_k_dense_replace=1)
    moemerge.merge(stack(model, (0, 2), (1, 3)), tmp_path / "out")
    assert zoo.read_config(tmp_path / "out")["first_k_dense_replace"] == 1
    moemerge.merge(stack(model, (1, 3)), tmp_path / "none")
    assert zoo.read_config(tmp_path / "none")["first_k_dense_replace"] == 0
    with pytest.raises(ArchitectureError, match="behind others"):
        moemerge.merge(stack(model, (1, 2), (0, 1)), tmp_path / "bad")


def test_periodic_layers_keep_their_place(tmp_path):
    model = zoo.build("qwen3_moe", tmp_path / "m", num_hidden_layers=4, decoder_sparse_step=2)
    moemerge.merge(stack(model, (0, 2), (0, 4)), tmp_path / "out")
    with pytest.raises(ArchitectureError, match="'decoder_sparse_step' is 2"):
        moemerge.merge(stack(model, (1, 4)), tmp_path / "bad")


def test_a_result_that_outgrows_its_dtype_is_refused(tmp_path):
    model = zoo.dense_llama(tmp_path / "m")
    entry = {"model": str(model), "parameters": {"scale": 1e6}}
    config = {"merge_method": "passthrough", "models": [entry], "out_dtype": "float16"}
    with pytest.raises(NumericalError, match=r"holds values that torch\.float16 cannot"):
        moemerge.merge(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_merges_into_one_folder_at_once_leave_one_whole_model(models, tmp_path, overwrite):
    """Whoever comes first has it; the others are told, or (`overwrite`) replace it."""
    config, out = linear(models, tokenizer_source="union"), tmp_path / "here" / "out"
    (tmp_path / "here").mkdir()
    moemerge.merge(config, tmp_path / "alone")
    ready = threading.Barrier(4)

    def merge(_):
        ready.wait()
        try:
            moemerge.merge(config, out, overwrite=overwrite)
        except CheckpointError as error:
            return str(error)
        return "done"

    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(merge, range(4)))
    assert "done" in ends
    assert all(end == "done" or "exists" in end or "another run" in end for end in ends), ends
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["out"]
    weights = [f / "model.safetensors" for f in (out, tmp_path / "alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
