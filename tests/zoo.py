"""Tiny random checkpoints of every MoE family that transformers knows, for the tests.

Nothing here is downloaded: a family's config class is filled with small numbers, the model is built
with random weights and saved with `save_pretrained`. The same seed gives the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moemerge.families import families
from moemerge.runtime.progress import Silent

EXPERTS = 8
TOP_K = 2
HIDDEN = 32
VOCAB = 128

# Small values by config key; a family takes those its config class has.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "model_max_length": 256,
    "sliding_window": 8,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_k": TOP_K,
    "moe_topk": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 2,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "hc_mult": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_MLA = {"num_key_value_heads": 4, "head_dim": None}
_LINEAR_MIX = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}

# What a family needs beyond the common values, where it does.
_EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0], "norm_topk_prob": True},
    "qwen3_next": {**_LINEAR_MIX, "mlp_only_layers": [0]},
    "qwen3_5_moe_text": {**_LINEAR_MIX},
    "qwen4_exp_text": {
        # What the checkpoint says; each release has a name of its own for it.
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "mellum": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    "minimax": {"layer_types": ["full_attention", "linear_attention", "full_attention"],
                "block_size": 8},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
    },
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy"},
    "mistral4": {**_MLA},
    "granitemoehybrid": {**_LINEAR_MIX},
    "cohere2_moe": {**_DENSE_FIRST},
    "jetmoe": {"num_key_value_heads": 2, "kv_channels": 8, "num_attention_heads": 4},
    "ernie4_5_moe": {"moe_layer_end_index": 2},
    "longcat_flash": {"num_layers": 2, "num_key_value_heads": 4, "head_dim": 8,
                      "zero_expert_num": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": TOP_K,
                    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    "phimoe": {"router_jitter_noise": 0.01},
    "deepseek_v3": {**_MLA},
    "deepseek_v32": {**_MLA, **_DENSE_FIRST},
    "glm4_moe_lite": {**_MLA, **_DENSE_FIRST},
    "glm_moe_dsa": {**_MLA, **_DENSE_FIRST},
    "axk1": {**_MLA, **_DENSE_FIRST},
    "axk2": {**_MLA, **_DENSE_FIRST, "gated_norm_rank": 4},
    "exaone_moe": {**_DENSE_FIRST},
    "kimi_linear": {**_MLA, **_DENSE_FIRST, **_LINEAR_MIX},
    "bailing_hybrid": {**_MLA, **_DENSE_FIRST, **_LINEAR_MIX, "short_conv_kernel_size": 2,
                       "layer_group_size": 2},
    "beam": {**_DENSE_FIRST},
    "mimo_v2_flash": {**_DENSE_FIRST},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8,
        "conv_kernel": 2, "chunk_size": 8, "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 16,
    },
    "hy_v4": {**_MLA, **_DENSE_FIRST},
    "hy_v3": {**_DENSE_FIRST},
    "afmoe": {"global_attn_every_n_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "minimax_m3_vl_text": {**_DENSE_FIRST, "dense_intermediate_size": 48, "rotary_dim": 4},
    "flint": {"mlp_only_layers": [0]},
    "laguna": {**_DENSE_FIRST, "num_attention_heads_per_layer": [4, 4, 4],
               "moe_router_logit_softcapping": 4.0},
    "llama4_text": {"intermediate_size_mlp": 48, "moe_layers": [1, 2], "num_experts_per_tok": 1,
                    "attention_chunk_size": 8},
    "inkling_text": {**_DENSE_FIRST, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
                     "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16, "n_shared_experts": 2,
                     "sliding_window_size": 8},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"], "o_groups": 2, "o_lora_rank": 8,
                    "head_dim": 16, "qk_rope_head_dim": None, "partial_rotary_factor": 0.5,
                    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention",
                                    "heavily_compressed_attention"],
                    "compress_rates": {"compressed_sparse_attention": 2,
                                       "heavily_compressed_attention": 4}},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
    "doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
}  # fmt: skip

# Rows of the table whose text model has no head of its own: it comes with a model of images.
_NO_TEXT_MODEL = {
    "qwen3_vl_moe",
    "deepseek_ocr2_text",
    "unlimited_ocr_text",
    "mistral_large4_text",
    "glm5_next_text",
    "step3p5",
    "muse_spark_text",
}  # most of them in `multimodal_zoo`

# Every row of the table is built and tested; most need no entry above.
FAMILIES: tuple[str, ...] = tuple(
    row.model_type for row in families.FAMILIES if row.model_type not in _NO_TEXT_MODEL
)

# One family of each kind of gate, layout and attention.
KINDS = {
    *("olmoe", "qwen2_moe", "qwen3_next", "mixtral", "jamba", "deepseek_v2", "deepseek_v3"),
    *("gpt_oss", "granitemoe", "phimoe", "llama4_text", "gemma4_text", "deepseek_v4", "lfm2_moe"),
    *("flex_olmo", "longcat_flash", "jetmoe", "glm_moe_dsa", "kimi_linear", "nemotron_h"),
    *("inkling_text", "muse_spark_text"),
}


def by_kind(names: Iterable[str]) -> list[Any]:
    """Parameters of a test that runs a whole job: `make slow` runs it for the other families."""
    return [pytest.param(n, marks=() if n in KINDS else pytest.mark.slow) for n in names]


# Families whose causal-LM class is not in transformers' automatic map.
_CLASSES = {"mistral4": "Mistral4ForCausalLM"}


def installed(model_type: str) -> bool:
    """Whether the installed transformers has this family (older releases lack the newest)."""
    return model_type in transformers.CONFIG_MAPPING


def config(model_type: str, **overrides: Any) -> Any:
    """The tiny config of a family."""
    cls = transformers.CONFIG_MAPPING[model_type]
    if model_type == "dbrx":
        return _dbrx_config(cls, overrides)
    known = set(cls.__dataclass_fields__)
    values = {k: v for k, v in {**_COMMON, **_EXTRA.get(model_type, {})}.items() if k in known}
    values.update(overrides)
    return cls(**{k: v for k, v in values.items() if v is not None})


def _dbrx_config(cls: Any, overrides: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {
        "d_model": HIDDEN,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "vocab_size": VOCAB,
        # rope_theta is read from the attention config although it is no field of it
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 24,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
        },
    }
    return cls(**{**values, **overrides})


def model(model_type: str, *, seed: int = 0, base_only: bool = False, **overrides: Any) -> Any:
    """The tiny random model itself."""
    cfg = config(model_type, **overrides)
    auto = transformers.AutoModel if base_only else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model_type in _CLASSES and not base_only:
            built = getattr(transformers, _CLASSES[model_type])(cfg)
        else:
            built = auto.from_config(cfg)
    _randomise(built, seed)
    return built.eval()


def _randomise(built: Any, seed: int) -> None:
    """Matrices of unit gain; vectors (norms, biases, selection biases) move by a tenth."""
    generator = torch.Generator().manual_seed(seed)
    experts = EXPERTS
    with torch.no_grad():
        for name, value in sorted(built.state_dict(keep_vars=True).items()):
            if not value.is_floating_point():
                if name.endswith("tid2eid"):  # token id -> experts, a table of integers
                    rows = torch.rand(value.shape[0], experts, generator=generator).argsort(1)
                    value.copy_(rows[:, : value.shape[1]])
            elif value.dim() >= 2 and "e_score" not in name:
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(noise * value.shape[-1] ** -0.5)
            else:
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    built.tie_weights()


def build(
    model_type: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    base_only: bool = False,
    shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """Save a family's tiny random model in its original on-disk layout, or as v5 holds it in memory
    (`fused`), or without its head (`base_only`, names without `model.`)."""
    with _quiet():
        built = model(model_type, seed=seed, base_only=base_only, **config_overrides).to(dtype)
        built.save_pretrained(folder, save_original_format=not fused, max_shard_size=shard_size)
    return Path(folder)


@contextlib.contextmanager
def _quiet() -> Any:
    """No advice and no progress bars from transformers inside."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved checkpoint, by its name on disk."""
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(shard, framework="pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


@contextlib.contextmanager
def edited(folder: Path, out: Path | None = None) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of a model in one file, or of its copy `out`, and write them again."""
    if out is not None:
        shutil.copytree(folder, out)
    (file,) = (out or folder).glob("*.safetensors")
    tensors = load_file(file)
    yield tensors
    save_file(tensors, file, metadata={"format": "pt"})


def spoilt(folder: Path, out: Path, name: str, value: float = float("nan")) -> Path:
    """Copy a model in one file and set one number of a tensor."""
    with edited(folder, out) as tensors:
        tensors[name].view(-1)[-1] = value
    return out


def add_layer(folder: Path, out: Path) -> Path:
    """Copy a model of three layers; a fourth is on disk, as for multi-token prediction."""
    with edited(folder, out) as tensors:
        own = {n: t for n, t in tensors.items() if n.startswith("model.layers.2.")}
        tensors |= {n.replace("layers.2", "layers.3"): t.clone() for n, t in own.items()}
        norm = own["model.layers.2.input_layernorm.weight"]
        tensors["model.layers.3.enorm.weight"] = norm.clone()
    return out


def assert_same(first: Path, second: Path) -> None:
    """Two checkpoints have the same tensors: names, dtypes and values."""
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name


def edit_config(folder: Path, **values: Any) -> None:
    """Change keys of config.json."""
    (folder / "config.json").write_text(json.dumps(read_config(folder) | values))


def adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write an adapter of PEFT's, by default of rank 2."""
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def lora(folder: Path, model: Path, *modules: str) -> Path:
    """Write a random LoRA of these linear maps of a model."""
    generator, stored, factors = torch.Generator().manual_seed(0), tensors(model), {}
    for module in modules:
        out, into = stored[f"{module}.weight"].shape
        factors[f"{module}.lora_A.weight"] = torch.randn(2, into, generator=generator)
        factors[f"{module}.lora_B.weight"] = torch.randn(out, 2, generator=generator)
    return adapter(folder, factors)


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write JSON, one row per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def linear(models: Iterable[Any], **more: Any) -> dict[str, Any]:
    """A config for the mean of some models; a mapping has their names."""
    named = models.items() if isinstance(models, Mapping) else ((None, one) for one in models)
    entries = [
        {"model": str(path), "name": name, "parameters": {"weight": 1.0}} for name, path in named
    ]
    return {"merge_method": "linear", "models": entries, **more}


def stacked(*parts: tuple[Path, Sequence[int]]) -> dict[str, Any]:
    """A config that stacks layers: of each model from a first one to before an end."""
    sources = [{"model": str(model), "layer_range": list(layers)} for model, layers in parts]
    return {"merge_method": "passthrough", "slices": [{"sources": [one]} for one in sources]}


class Notes(Silent):
    """Progress that remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


def perturb(folder: Path, out: Path, seed: int, scale: float = 0.02) -> Path:
    """A "fine-tune" of a checkpoint: every float tensor moves by `scale` of its own spread."""
    out = Path(out)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    for shard in sorted(Path(folder).glob("*.safetensors")):
        moved = {}
        with safe_open(shard, framework="pt") as opened:
            for name in sorted(opened.keys()):
                value = opened.get_tensor(name)
                if value.is_floating_point():
                    spread = value.float().pow(2).mean().sqrt()
                    noise = torch.randn(value.shape, generator=generator)
                    value = (value.float() + scale * spread * noise).to(value.dtype)
                moved[name] = value.contiguous()
        save_file(moved, out / shard.name, metadata={"format": "pt"})
    return out


def dense_llama(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    qwen: bool = False,
    layers: int = 4,
    vocab: int = VOCAB,
    hidden: int = HIDDEN,
    **config_overrides: Any,
) -> Path:
    """A tiny dense Llama (or Qwen2, with attention biases)."""
    cls = transformers.Qwen2Config if qwen else transformers.LlamaConfig
    cfg = cls(
        **{
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            **config_overrides,
        }
    )
    built = transformers.AutoModelForCausalLM.from_config(cfg)
    _randomise(built, seed)
    with _quiet():
        built.to(dtype).save_pretrained(folder)
    return Path(folder)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
_WORDS = """
the a one two three four five six seven eight nine ten plus minus times is equal to of and add sub
def return print for in range if else while sum list dict value x y z n i j k what why how please
compute write code math answer question number function loop model expert router
"""


def tiny_tokenizer(
    folder: Path,
    *,
    extra_words: tuple[str, ...] = (),
    words: tuple[str, ...] | None = None,
    chat_template: bool = False,
) -> Path:
    """A real fast tokenizer (whole words, about 90 tokens) beside a checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = [
        "<pad>",
        "<s>",
        "</s>",
        "<unk>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|end|>",
    ]
    vocabulary = [*special, *(words or _WORDS.split()), *".,:;?!()+-*/=0123456789", *extra_words]
    ids = {word: index for index, word in enumerate(dict.fromkeys(vocabulary))}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", ids["<s>"])]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=special[4:],
        chat_template=CHAT_TEMPLATE if chat_template else None,
    )
    fast.save_pretrained(folder)
    return Path(folder)


def assert_loads(folder: Path) -> None:
    """transformers reads all of it, and it runs."""
    name = read_config(folder)["architectures"][0]
    with _quiet():
        loaded, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        logits = loaded(input_ids=torch.arange(3, 12).unsqueeze(0), use_cache=False).logits
    assert torch.isfinite(logits).all()


def read_config(folder: Path) -> dict[str, Any]:
    """The saved config.json."""
    loaded: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return loaded
