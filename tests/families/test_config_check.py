"""A config.json is compared with the tensors before a model is written."""

import json
import math
import shutil

import pytest

import moemerge
import multimodal_zoo
import zoo
from moemerge.errors import ArchitectureError
from moemerge.families.config_check import check_config, check_model_config
from moemerge.families.config_values import value_faults
from moemerge.families.opened import open_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return zoo.build("olmoe", tmp_path_factory.mktemp("sound") / "model")


def with_values(config, values):
    """Return the config with other values; `...` removes a key."""
    return {name: value for name, value in {**config, **values}.items() if value is not ...}


def changed(folder, out, **values):
    """Copy a model and change values of its config."""
    shutil.copytree(folder, out)
    config = with_values(zoo.read_config(folder), values)
    (out / "config.json").write_text(json.dumps(config))
    return out


def check(model, config, other=None):
    others = {} if other is None else {"other": other}
    check_config(config, model.checkpoint.tensors, "x/config.json", others=others)


@pytest.mark.parametrize("family", [name for name in zoo.FAMILIES if zoo.installed(name)])
def test_a_config_that_transformers_saved_passes(family, tmp_path):
    model = open_model("m", zoo.build(family, tmp_path / "model"))
    check(model, dict(model.checkpoint.config), dict(model.checkpoint.config))


@pytest.mark.parametrize("qwen", [False, True])
def test_a_dense_model_passes(qwen, tmp_path):
    model = open_model("m", zoo.dense_llama(tmp_path / "model", qwen=qwen))
    config = dict(model.checkpoint.config)
    check(model, config, config)
    with pytest.raises(ArchitectureError, match=r"intermediate_size is 15, but .* makes it 48"):
        check(model, {**config, "intermediate_size": 15})


def rope(**values):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **values}}


# Each value is wrong in every model alike: no comparison with another config reveals it.
WRONG = [
    (
        {"num_attention_heads": 8},
        "num_attention_heads is 8, head_dim is 4|num_key_value_heads is 2, head_dim is 4",
    ),
    ({"num_key_value_heads": 1}, "num_key_value_heads is 1, head_dim is 8, which makes 8 rows"),
    ({"num_key_value_heads": 4}, "heads is 4, .* makes 32 rows, but .*k_proj.* has 16"),
    ({"num_attention_heads": "4"}, "num_attention_heads is '4', expected a positive whole number"),
    ({"head_dim": 16}, "head_dim is 16, which makes (32|64) rows, but .*_proj.* has (16|32)"),
    ({"hidden_size": 64}, "hidden_size is 64, but model.embed_tokens.weight makes it 32"),
    ({"intermediate_size": 15}, "intermediate_size is 15, but .* makes it 48"),
    ({"num_experts": 4}, "counts 4 experts"),
    ({"num_experts_per_tok": 9}, "each token goes to 9 experts"),
    ({"num_hidden_layers": 4}, "counts 4 layers, the tensors make 3"),
    ({"num_hidden_layers": 2}, "the config has 2 layers, but the tensors have a layer 2"),
    ({"num_hidden_layers": ...}, "num_hidden_layers.* is missing; the tensors make it 3"),
    ({"vocab_size": 127}, "vocab_size is 127, but model.embed_tokens.weight makes it 128"),
    ({"vocab_size": ...}, "vocab_size is missing; model.embed_tokens.weight makes it 128"),
    (rope(rope_theta=None), "rope_theta is None, expected a finite number of at least 1"),
    (rope(rope_theta="10000"), "rope_theta is '10000', expected a finite number of at least 1"),
    (rope(rope_theta=0), "rope_theta is 0, expected a finite number of at least 1"),
    (rope(rope_theta=1e-300), "rope_theta is 1e-300, expected a finite number of at least 1"),
    ({"head_dim": 0}, "head_dim is 0, which makes 0 rows"),
    ({"head_dim": None}, "head_dim is None, expected a whole number, or no such key"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected a positive whole number"),
    ({"attention_bias": True}, "attention_bias is true, but no projection of the attention has"),
    ({"num_experts_per_tok": None}, "num_experts_per_tok is None, expected a whole number"),
    ({"clip_qkv": -1}, "clip_qkv is -1, expected a finite number with a decimal point or null"),
    ({"architectures": "x"}, "architectures is 'x', expected a list or null"),
    ({"rope_theta": None}, "rope_theta is None"),
    ({"rope_theta": "10000"}, "rope_theta is '10000'"),
    ({"rope_theta": math.inf}, "rope_theta is inf"),
    ({"rope_theta": True}, "rope_theta is True"),
    (rope(rope_type="x"), "rope_type is 'x', expected one of"),
    (rope(rope_type=[]), "rope_type is .*, expected one of"),
    (rope(rope_type="axial"), "rope_type is 'axial', expected one of"),
    (rope(rope_type="yarn"), "factor is None, expected a positive finite number"),
    ({"num_experts": ...}, "the number of experts .* is missing; .* has 8"),
    ({"num_experts": [None]}, "num_experts is .*, expected a whole number"),
    ({"num_experts": 0}, "the number of experts .* is missing; .* has 8"),
    ({"num_attention_heads": ...}, "the number of attention heads .* is missing"),
    ({"intermediate_size": ...}, "intermediate_size is missing; .* makes it 48"),
    ({"rope_parameters": [1]}, "rope_parameters is .* expected a mapping"),
    ({"hidden_act": None}, "hidden_act is None, expected a text"),
    ({"initializer_range": 1}, "initializer_range is 1, expected a finite number with a decimal"),
    ({"pad_token_id": []}, "pad_token_id is .*, expected a token id"),
    ({"rms_norm_eps": None}, "rms_norm_eps is None, expected a positive finite number"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, expected a positive finite number"),
    ({"pad_token_id": 128}, r"pad_token_id is 128, but the vocabulary has 128 tokens"),
    ({"pad_token_id": -math.inf}, "pad_token_id is -inf, expected a token id"),
    ({"eos_token_id": [2, 500]}, "eos_token_id is 500, but the vocabulary has 128 tokens"),
    ({"bos_token_id": "1"}, "bos_token_id is '1', expected a token id"),
    ({"hidden_act": "sulu"}, "hidden_act is 'sulu', .* did you mean 'silu'"),
    ({"experts_implementation": "x"}, "experts_implementation is 'x', expected a name that"),
    ({"attn_implementation": "flash"}, "attn_implementation is 'flash', expected a name that"),
    ({"dtype": 16}, "dtype is 16, expected a name"),
    (
        {"layer_types": ["none", "none", "none"]},
        "layer_types is .*, expected a list of",
    ),
    (
        {"model_type": "mixtral"},
        "model_type is 'mixtral', but architectures has 'Olmoe",
    ),
    ({"model_type": "olmo"}, "model_type is 'olmo', a dense model, but there is .*experts"),
    ({"dtype": "float17"}, "dtype is 'float17', .* did you mean 'float1?6'|float"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
]


WRONG_IN_FAMILY = [
    ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank is None, but there is .*q_a_proj"),
    ("deepseek_v3", {"q_lora_rank": 3}, "q_lora_rank is 3, which makes 3 rows, but .*q_a_proj"),
    ("qwen3_next", {"linear_key_head_dim": 4}, "linear_key_head_dim is 4, .* makes 48 rows, but"),
    (
        "qwen3_next",
        {"linear_conv_kernel_dim": 4},
        "makes 4 entries on axis 2, but .*conv1d.* has 2",
    ),
    ("longcat_flash", {"zero_expert_num": "x"}, "zero_expert_num is 'x', expected a whole number"),
    ("gemma4_text", {"rope_parameters": {"a": {}, "b": 1}}, "rope_parameters.b is 1, expected a m"),
    ("dbrx", {"attn_config": {"kv_n_heads": 4}}, "num_key_value_heads is 4, .* makes 96 rows"),
    ("deepseek_v3", {"n_shared_experts": 3}, "n_shared_experts is 3, which makes 72 columns"),
    ("deepseek_v3", {"first_k_dense_replace": None}, "first_k_dense_replace is null"),
    ("deepseek_v3", {"num_hidden_layers": 1}, "has 1 layers, but the tensors have a layer [12]"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 7}, "which makes 7 columns, but .*shared"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list"),
]


@pytest.mark.parametrize(("family", "values", "message"), WRONG_IN_FAMILY)
def test_a_wrong_value_of_a_family_is_refused(family, values, message, zoo_folder):
    model = open_model("m", zoo_folder(family))
    with pytest.raises(ArchitectureError, match=message):
        check(model, {**model.checkpoint.config, **values})


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_a_wrong_value_is_refused(sound, values, message):
    model = open_model("m", sound)
    with pytest.raises(ArchitectureError, match=f"x/config.json: .*({message})"):
        check(model, with_values(dict(model.checkpoint.config), values))


@pytest.mark.parametrize(
    "values",
    [
        {"pad_token_id": -1},
        {"pad_token_id": None},
        {"eos_token_id": [2, 3]},
        {"head_dim": 8},
        {"experts_implementation": "grouped_mm"},
        {"attn_implementation": "org/kernel"},
        {"torch_dtype": "torch.bfloat16"},
        rope(rope_type="yarn", factor=4.0),
    ],
    ids=str,
)
def test_unusual_values_that_load_are_accepted(sound, values):
    model = open_model("m", sound)
    check(model, with_values(dict(model.checkpoint.config), values))


def test_a_copied_config_names_its_model_type(sound, tmp_path):
    model = changed(sound, tmp_path / "model", model_type=None)
    with pytest.raises(ArchitectureError, match="model_type is None, expected a name"):
        moemerge.swap_routers(model, sound, tmp_path / "out")


def test_shared_experts_may_have_a_width_of_their_own(zoo_folder):
    model = open_model("m", zoo_folder("deepseek_v3"))
    config = {**model.checkpoint.config, "moe_shared_expert_intermediate_size": 24}
    check(model, {**config, "n_shared_experts": 3})


def test_activations_must_agree_between_models(sound):
    model = open_model("m", sound)
    config = dict(model.checkpoint.config)
    with pytest.raises(ArchitectureError, match="hidden_act is 'gelu', but 'silu' in other"):
        check(model, {**config, "hidden_act": "gelu"}, config)


@pytest.mark.parametrize("family", multimodal_zoo.FAMILIES)
def test_an_encoder_of_images_may_use_its_own_rotary_type(family):
    if not zoo.installed(family):
        pytest.skip(f"the installed transformers has no {family}")
    config = json.loads(multimodal_zoo.config(family).to_json_string(use_diff=False))
    text = config["text_config"]
    assert not list(value_faults(config, text))
    if family == "muse_spark_text":
        for part, kind in (("text_config", "axial"), ("vision_config", "x")):
            wrong = {**config[part], **rope(rope_type=kind)}
            whole = {**config, part: wrong}
            assert "rope_type" in next(value_faults(whole, whole["text_config"]))


def test_models_outside_the_family_table_pass(sound):
    model = open_model("m", sound)
    config = {**model.checkpoint.config, "model_type": "of-tomorrow", "pad_token_id": "x"}
    check(model, config, config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": None}, "rope_theta is None"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"experts_implementation": "x"}, "experts_implementation is 'x'"),
    ],
)
def test_a_value_that_is_wrong_in_the_first_model_only(sound, tmp_path, values, message):
    wrong = changed(sound, tmp_path / "wrong", **values)
    config = zoo.linear([wrong, sound])
    with pytest.raises(ArchitectureError, match=f"wrong/config.json: .*{message}"):
        moemerge.validate(config, tmp_path / "out")
    with pytest.raises(ArchitectureError, match=f"wrong/config.json: .*{message}"):
        moemerge.merge(config, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]


def test_a_lenient_merge_warns_and_writes(sound, tmp_path):
    wrong = changed(sound, tmp_path / "wrong", pad_token_id=-math.inf)
    config = {"merge_method": "passthrough", "models": [{"model": str(wrong)}]}
    with pytest.raises(ArchitectureError, match=r"wrong/config.json: pad_token_id is -inf"):
        moemerge.merge(config, tmp_path / "out")
    report = moemerge.merge(config, tmp_path / "kept", lenient=True)
    assert any("pad_token_id is -inf" in notice for notice in report.notices)
    assert zoo.read_config(tmp_path / "kept")["pad_token_id"] == -math.inf
    with pytest.raises(ArchitectureError, match="pad_token_id is -inf"):
        check_model_config(open_model("m", wrong))
    with pytest.raises(ArchitectureError, match="pad_token_id is -inf"):
        moemerge.swap_routers(wrong, sound, tmp_path / "out")


def test_a_config_without_a_type_gets_that_of_its_class(sound, tmp_path):
    """Otherwise the result loads only with the class named explicitly."""
    nameless = changed(sound, tmp_path / "nameless", model_type=...)
    config = {"merge_method": "passthrough", "models": [{"model": str(nameless)}]}
    moemerge.merge(config, tmp_path / "out")
    assert zoo.read_config(tmp_path / "out")["model_type"] == "olmoe"


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        (
            "qwen3_moe",
            {"decoder_sparse_step": 3},
            "decoder_sparse_step is 3 .* layer 1 has a router",
        ),
        ("qwen3_moe", {"mlp_only_layers": []}, "mlp_only_layers is .*, but layer 0 has no router"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "layer 1 has a router"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "replace is 2, but layer 1 has a router"),
        ("deepseek_v3", {"first_k_dense_replace": 0}, "replace is 0, but layer 0 has no router"),
    ],
)
def test_layers_have_experts_where_the_config_states_it(family, values, message, tmp_path):
    model = open_model("m", zoo.build(family, tmp_path / "model"))
    with pytest.raises(ArchitectureError, match=message):
        check(model, with_values(dict(model.checkpoint.config), values))
