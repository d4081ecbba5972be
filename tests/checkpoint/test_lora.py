"""Adapters: what we read must be what peft's own merge gives."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import zoo
from moemerge.checkpoint import AdaptedCheckpoint, Checkpoint
from moemerge.checkpoint.safetensors_file import add_metadata
from moemerge.config.models import ModelRef
from moemerge.errors import CheckpointError

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 24,
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]


def llama(**extra):
    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=12, **extra))


def olmoe(intermediate_size=12, **extra):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": intermediate_size}
    return OlmoeForCausalLM(OlmoeConfig(**SMALL, **moe, **extra))


def qwen3_moe():
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **moe, intermediate_size=12, head_dim=8))


def randomise(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise.to(parameter.dtype) * 0.3)


def saved(tmp_path, build, *, fused, dtype, **lora):
    """Save base, adapter and peft's merge, all with random weights."""
    torch.manual_seed(0)
    model = build().to(dtype)
    randomise(model)
    model.save_pretrained(tmp_path / "base", save_original_format=not fused)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 3, "lora_alpha": 5, **lora}))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name or parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                scale = 0.2 if "magnitude" not in name else 0.05
                shift = 1.0 if "magnitude" in name else 0.0
                parameter.copy_((noise * scale + shift).to(parameter.dtype))
    wrapped.save_pretrained(tmp_path / "adapter")
    merged = wrapped.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged", save_original_format=not fused)
    return tmp_path


def compare(folder, tolerance=1e-6):
    base = Checkpoint.open(folder / "base")
    ours = Checkpoint.open(ModelRef(str(folder / "base"), lora=str(folder / "adapter")))
    assert isinstance(ours, AdaptedCheckpoint)
    merged = Checkpoint.open(folder / "merged")
    assert set(ours) == set(merged)
    changed = 0
    for name in ours:
        assert ours[name].dtype == base[name].dtype
        torch.testing.assert_close(ours[name], merged[name], rtol=tolerance, atol=tolerance)
        changed += not torch.equal(ours[name], base[name])
    assert changed > 0
    check_rows(ours)
    return ours


def check_rows(ours):
    """Blocks of rows are the rows of the whole (up to the order of sums in a product)."""
    for name, info in ours.tensors.items():
        whole = ours.read(name)
        assert tuple(whole.shape) == info.shape
        blocks = [ours.read(name, (i, min(i + 3, info.rows))) for i in range(0, info.rows, 3)]
        torch.testing.assert_close(torch.cat(blocks), whole, rtol=1e-5, atol=1e-6)


CASES = {
    "llama": (llama, {"target_modules": ATTENTION}),
    "all linear, rslora": (llama, {"target_modules": "all-linear", "use_rslora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 4},
            "alpha_pattern": {"v_proj": 9},
        },
    ),
    "embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "modules to save": (llama, {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "norms saved": (llama, {"target_modules": ATTENTION, "modules_to_save": ["norm"]}),
    "bias all": (
        lambda: llama(attention_bias=True),
        {"target_modules": ATTENTION, "bias": "all"},
    ),
    "bias lora_only": (
        lambda: llama(attention_bias=True),
        {"target_modules": ATTENTION, "bias": "lora_only"},
    ),
    "lora bias": (
        lambda: llama(attention_bias=True),
        {"target_modules": ATTENTION, "lora_bias": True},
    ),
    "dora": (llama, {"target_modules": ATTENTION, "use_dora": True}),
    "olmoe experts": (olmoe, {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "olmoe square stacks": (
        lambda: olmoe(8),
        {"target_modules": ATTENTION, "target_parameters": EXPERTS},
    ),
    "olmoe one stack": (olmoe, {"target_modules": [], "target_parameters": EXPERTS[1:]}),
    "olmoe routers": (olmoe, {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
    "olmoe expert patterns": (
        olmoe,
        {
            "target_modules": [],
            "target_parameters": EXPERTS,
            "rank_pattern": {"experts.down_proj": 2},
            "alpha_pattern": {"experts.gate_up_proj": 1},
        },
    ),
    "qwen3_moe experts": (qwen3_moe, {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
}


@pytest.mark.parametrize(
    ("case", "fused"),
    [(case, f) for case in CASES for f in (False, True) if "moe" in case or not f],
)
def test_reads_what_peft_merges(tmp_path, case, fused):
    build, lora = CASES[case]
    ours = compare(saved(tmp_path, build, fused=fused, dtype=torch.float32, **lora))
    assert fused == ("model.layers.0.mlp.experts.gate_up_proj" in ours)


def test_bfloat16_is_rounded_once(tmp_path):
    """Nearer to the exact sum than peft's own merge, which rounds the product first."""
    folder = saved(tmp_path, llama, fused=False, dtype=torch.bfloat16, target_modules=ATTENTION)
    ours = compare(folder, tolerance=2e-2)
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    module = "model.layers.0.self_attn.q_proj"
    a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"].float() for x in "AB")
    base = Checkpoint.open(folder / "base")[f"{module}.weight"].float()
    assert torch.equal(ours[f"{module}.weight"], (base + 5 / 3 * (b @ a)).bfloat16())


def per_expert_adapter(tmp_path):
    """An adapter on every expert's own matrices, as older transformers trained them."""
    torch.manual_seed(3)
    tensors, deltas = {}, {}
    for matrix, out, into in (("gate_proj", 12, 16), ("up_proj", 12, 16), ("down_proj", 16, 12)):
        for expert in range(4):
            module = f"model.layers.1.mlp.experts.{expert}.{matrix}"
            a, b = torch.randn(2, into), torch.randn(out, 2)
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            deltas[f"{module}.weight"] = 2 * b @ a
    return zoo.adapter(tmp_path / "adapter", tensors), deltas


def test_adapters_on_single_experts_in_both_layouts(tmp_path):
    adapter, deltas = per_expert_adapter(tmp_path)
    model = olmoe()
    randomise(model)
    model.save_pretrained(tmp_path / "split")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    split = Checkpoint.open(f"{tmp_path / 'split'}+{adapter}")
    plain = Checkpoint.open(tmp_path / "split")
    for name in plain:
        expected = plain[name] + deltas.get(name, 0)
        torch.testing.assert_close(split[name], expected)
    fused = Checkpoint.open(f"{tmp_path / 'fused'}+{adapter}")
    owner = "model.layers.1.mlp.experts"
    for e in range(4):
        gate, up, down = (
            split[f"{owner}.{e}.{m}.weight"] for m in ("gate_proj", "up_proj", "down_proj")
        )
        torch.testing.assert_close(fused[f"{owner}.gate_up_proj"][e], torch.cat([gate, up]))
        torch.testing.assert_close(fused.read(f"{owner}.down_proj", (e, e + 1))[0], down)
    check_rows(fused)


@pytest.fixture
def base(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


Q = "model.layers.0.self_attn.q_proj"


def pair(module=Q, rank=2, out=16, into=16):
    return {
        f"{module}.lora_A.weight": torch.ones(rank, into),
        f"{module}.lora_B.weight": torch.ones(out, rank),
    }


REFUSED = {
    "another type": (pair(), {"peft_type": "IA3"}, "of type 'IA3', expected 'LORA'"),
    "no rank": (pair(), {"r": None}, "r must be a whole number"),
    "qalora": (pair(), {"use_qalora": True}, "use_qalora is set"),
    "pissa": (pair(), {"init_lora_weights": "pissa_niter_4"}, "changed the base weights"),
    "flags in a pattern": (pair(), {"rank_pattern": {"(?i)q": 2}}, "not a regular expression"),
    "unknown module": (pair("model.layers.9.q_proj"), {}, "match nothing in"),
    "stray tensor": ({**pair(), "model.new.weight": torch.ones(2)}, {}, "model.new.weight"),
    "half a pair": ({f"{Q}.lora_A.weight": torch.ones(2, 16)}, {}, "without the other half"),
    "wrong rank": (pair(rank=3), {}, "a multiple of the rank 2"),
    "wrong width": (pair(into=8), {}, "does not fit"),
    "convolution": (
        {f"{Q}.lora_A.weight": torch.ones(2, 3, 1), f"{Q}.lora_B.weight": torch.ones(4, 2, 1)},
        {},
        "adapters on convolutions are not supported",
    ),
    "replacement of another shape": ({"lm_head.weight": torch.ones(24, 3)}, {}, "only the vocab"),
    "bias without a base bias": (
        {**pair(), f"{Q}.lora_B.bias": torch.ones(16)},
        {},
        "match nothin",
    ),
    "nesting without names": (pair(f"{Q}.base_layer") | pair(), {}, "2 nested pairs"),
    "dora on embeddings": (
        {
            "model.embed_tokens.lora_embedding_A": torch.ones(2, 24),
            "model.embed_tokens.lora_embedding_B": torch.ones(16, 2),
            "model.embed_tokens.lora_magnitude_vector": torch.ones(24),
        },
        {"use_dora": True},
        "uses DoRA",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_do_not_fit_are_refused(tmp_path, base, case):
    tensors, config, message = REFUSED[case]
    adapter = zoo.adapter(tmp_path / "adapter", tensors, **config)
    with pytest.raises(CheckpointError, match=message):
        AdaptedCheckpoint(base, adapter)


def test_incomplete_adapter_folders(tmp_path, base):
    adapter = zoo.adapter(tmp_path / "adapter", pair())
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no adapter weights"):
        AdaptedCheckpoint(base, adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        AdaptedCheckpoint(base, adapter)


def test_quantised_bases_are_refused(make_folder, tmp_path):
    weight = torch.ones(16, 16).to(torch.float8_e4m3fn)
    folder = make_folder("base", {"model.safetensors": {f"{Q}.weight": weight}}, config={})
    with pytest.raises(CheckpointError, match=r"stored as float8_e4m3fn"):
        AdaptedCheckpoint(folder, zoo.adapter(tmp_path / "adapter", pair()))


def test_pickled_adapters(tmp_path, base):
    adapter = zoo.adapter(tmp_path / "adapter", pair())
    expected = AdaptedCheckpoint(base, adapter)[f"{Q}.weight"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    torch.save(tensors, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    assert torch.equal(AdaptedCheckpoint(base, adapter)[f"{Q}.weight"], expected)


def test_transposed_storage(make_folder, tmp_path):
    weight = torch.zeros(5, 7)  # Conv1D: (in, out)
    folder = make_folder("base", {"model.safetensors": {"h.weight": weight}}, config={})
    a, b = torch.randn(2, 5), torch.randn(7, 2)
    tensors = {"h.lora_A.weight": a, "h.lora_B.weight": b}
    adapter = zoo.adapter(tmp_path / "adapter", tensors, fan_in_fan_out=True)
    ours = AdaptedCheckpoint(folder, adapter)
    torch.testing.assert_close(ours["h.weight"], 2 * (b @ a).T)
    check_rows(ours)


def test_stacks_stored_transposed(make_folder, tmp_path):
    """gpt_oss keeps (experts, in, out), and PEFT knows; square, only the family tells."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    files = {"model.safetensors": {name: torch.zeros(3, 6, 6)}}
    folder = make_folder("base", files, config={"model_type": "gpt_oss"})
    a, b = torch.randn(6, 6), torch.randn(6, 6)
    owner = name.rpartition(".")[0]
    tensors = {f"{owner}.lora_A.weight": a, f"{owner}.lora_B.weight": b}
    adapter = zoo.adapter(tmp_path / "adapter", tensors, target_parameters=["experts.gate_up_proj"])
    expected = 2 * torch.einsum("ore,eri->eio", b.view(6, 2, 3), a.view(3, 2, 6))
    torch.testing.assert_close(AdaptedCheckpoint(folder, adapter)[name], expected)


def test_resized_embeddings_carry_the_vocabulary(tmp_path, base):
    torch.manual_seed(0)
    embed, head = torch.randn(30, 16), torch.randn(30, 16)
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": head, **pair()}
    ours = AdaptedCheckpoint(base, zoo.adapter(tmp_path / "adapter", tensors))
    assert ours.config["vocab_size"] == 30
    assert ours.tensors["lm_head.weight"].shape == (30, 16)
    assert torch.equal(ours.read("model.embed_tokens.weight", (24, 30)), embed[24:])


def test_tied_output_layers(tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    embed = torch.randn(30, 16)
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": embed.clone(), **pair()}
    ours = AdaptedCheckpoint(tmp_path / "base", zoo.adapter(tmp_path / "a", tensors))
    assert "lm_head.weight" not in ours
    tensors["lm_head.weight"] = embed + 1
    with pytest.raises(CheckpointError, match="tied to the embeddings"):
        AdaptedCheckpoint(tmp_path / "base", zoo.adapter(tmp_path / "b", tensors))


def test_companions_and_fingerprint(tmp_path, base):
    (base / "tokenizer.json").write_text("base")
    adapter = zoo.adapter(tmp_path / "adapter", pair())
    (adapter / "tokenizer.json").write_text("adapter")
    ours = AdaptedCheckpoint(base, adapter)
    assert ours.companions()["tokenizer.json"].read_text() == "adapter"
    assert "generation_config.json" in ours.companions()
    assert ours.fingerprint() != Checkpoint.open(base).fingerprint()
    other = zoo.adapter(tmp_path / "other", {n: t * 2 for n, t in pair().items()})
    assert ours.fingerprint() != AdaptedCheckpoint(base, other).fingerprint()


def test_a_scaling_beyond_float32_is_refused(base, tmp_path):
    adapter = zoo.adapter(tmp_path / "adapter", pair(), lora_alpha=1e300)
    with pytest.raises(CheckpointError, match=r"lora_alpha of 1e\+300"):
        Checkpoint.open(f"{base}+{adapter}")


# --- layouts of pairs on stacked experts ----------------------------------------------------------
STACKS = {"down_proj": (16, 8), "gate_up_proj": (16, 16)}  # (out, in) of `olmoe(8)`, outer first


def stacked_adapter(folder, stacks, *, in_out=False, grouped=False, **config):
    """Write pairs of rank 2 on four experts of layer 0; return the changes as (experts, out, in).

    PEFT before 0.19.1 took the first axis of an expert's matrix for its input (`in_out`).
    """
    generator = torch.Generator().manual_seed(4)
    owner, tensors, changes = "model.layers.0.mlp.experts", {}, {}
    for depth, stack in enumerate(stacks):
        out, into = STACKS[stack][::-1] if in_out else STACKS[stack]
        a = torch.randn(4, 2, into, generator=generator)
        b = torch.randn(4, out, 2, generator=generator)
        module = owner + ".base_layer" * depth
        tensors[f"{module}.lora_A.weight"] = a.reshape(8, into)
        order = (1, 0, 2) if grouped else (1, 2, 0)  # (out, experts * rank), (out, rank * experts)
        tensors[f"{module}.lora_B.weight"] = b.permute(order).reshape(out, 8).contiguous()
        changes[stack] = 2 * (b @ a).mT if in_out else 2 * b @ a
    zoo.adapter(folder, tensors, target_parameters=[f"mlp.experts.{s}" for s in stacks], **config)
    return changes


@pytest.fixture(params=["per expert", "fused"])
def experts(tmp_path, request):
    model = olmoe(8)
    model.save_pretrained(tmp_path / "base", save_original_format=request.param == "per expert")
    return tmp_path / "base"


def changes_of(base, adapter):
    """Return what an adapter adds to the stacks of layer 0, for either layout of the base."""
    plain, ours = Checkpoint.open(base), Checkpoint.open(f"{base}+{adapter}")
    owner = "model.layers.0.mlp.experts"

    def change(name):
        return ours[f"{owner}.{name}"] - plain[f"{owner}.{name}"]

    if f"{owner}.down_proj" in plain:
        return {stack: change(stack) for stack in STACKS}
    gate, up, down = (
        torch.stack([change(f"{e}.{m}_proj.weight") for e in range(4)])
        for m in ("gate", "up", "down")
    )
    return {"gate_up_proj": torch.cat([gate, up], dim=1), "down_proj": down}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("in_out", [False, True])
def test_one_layout_for_all_stacks(tmp_path, experts, in_out, grouped):
    """The square stack follows its sibling; alone, it follows PEFT's version or the user."""
    adapter, order = tmp_path / "a", ["rank_major", "grouped_by_expert"][grouped]
    both = stacked_adapter(adapter, [*STACKS], in_out=in_out, grouped=grouped, lora_B_layout=order)
    for stack, change in changes_of(experts, str(adapter)).items():
        torch.testing.assert_close(change, both[stack], rtol=1e-4, atol=1e-5)
    version = "0.19.0" if in_out else "0.19.1"
    cases = {"version": (version, order, ""), "user": (None, None, f"#{order}")}
    for name, (peft_version, stated, suffix) in cases.items():
        expected = stacked_adapter(
            tmp_path / name,
            ["gate_up_proj"],
            in_out=in_out,
            grouped=grouped,
            peft_version=peft_version,
            lora_B_layout=stated,
        )
        if peft_version is None:
            with pytest.raises(CheckpointError, match="no peft_version"):
                changes_of(experts, f"{tmp_path / name}{suffix}")
            suffix += ",in_out" if in_out else ",out_in"
        change = changes_of(experts, f"{tmp_path / name}{suffix}")["gate_up_proj"]
        torch.testing.assert_close(change, expected["gate_up_proj"], rtol=1e-4, atol=1e-5)


def test_unstated_orders_of_experts(tmp_path, experts):
    stacked_adapter(tmp_path / "peft", [*STACKS])
    (notice,) = Checkpoint.open(f"{experts}+{tmp_path / 'peft'}").notices
    assert "without a lora_B_layout" in notice
    assert Checkpoint.open(f"{experts}+{tmp_path / 'peft'}#rank_major").notices == ()
    add_metadata(tmp_path / "peft/adapter_model.safetensors", {"lora_B_layout": "rank_major"})
    assert Checkpoint.open(f"{experts}+{tmp_path / 'peft'}").notices == ()
    stacked_adapter(tmp_path / "unsloth", [*STACKS], auto_mapping={"unsloth_fixed": True})
    with pytest.raises(CheckpointError, match="either of two orders"):
        Checkpoint.open(f"{experts}+{tmp_path / 'unsloth'}")
    Checkpoint.open(f"{experts}+{tmp_path / 'unsloth'}#grouped_by_expert")
    stacked_adapter(tmp_path / "new", [*STACKS], lora_B_layout="spiral")
    with pytest.raises(CheckpointError, match="lora_B_layout"):
        Checkpoint.open(f"{experts}+{tmp_path / 'new'}")
