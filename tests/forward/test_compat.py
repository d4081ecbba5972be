"""Each private name of transformers and torch that we use still exists and does what we need.

If a new release fails here, the message names the function of `features/compat.py` or
`runtime/torch_compat.py` that must change.
"""

import inspect

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import moe

from moemerge.errors import CheckpointError
from moemerge.forward import compat
from moemerge.runtime import torch_compat


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.fixture
def model(zoo_folder):
    config = AutoConfig.from_pretrained(zoo_folder("olmoe"))
    return compat.build_model(OlmoeForCausalLM, config, torch.bfloat16)


def experts_of(model):
    return next(module for module in model.modules() if compat.is_experts(module))


# --- the table of conversions -----------------------------------------------------------------


def test_get_model_conversion_mapping(model):
    entries = compat.get_model_conversion_mapping(model)
    assert any(isinstance(entry, compat.WeightConverter) for entry in entries)
    known = (compat.WeightConverter, compat.WeightRenaming)
    assert all(isinstance(entry, known) for entry in entries)


def test_rename_source_key(model):
    assert len(parameters(compat.rename_source_key)) >= 5
    entries = compat.get_model_conversion_mapping(model)
    converters = [entry for entry in entries if isinstance(entry, compat.WeightConverter)]
    stored = "model.layers.0.mlp.experts.1.down_proj.weight"
    target, pattern = compat.rename_source_key(
        stored, [], converters, model.base_model_prefix, model.state_dict()
    )
    assert target == "model.layers.0.mlp.experts.down_proj"
    assert any(pattern in converter.source_patterns for converter in converters)


def test_dot_natural_key():
    names = ["a.10.b", "a.9.b", "a.1.b"]
    assert sorted(names, key=compat.dot_natural_key) == ["a.1.b", "a.9.b", "a.10.b"]


def test_weight_converter():
    converter = compat.WeightConverter(
        ["experts.*.gate.weight", "experts.*.up.weight"],
        "experts.gate_up",
        operations=[compat.MergeModulelist(dim=0), compat.Concatenate(dim=1)],
    )
    assert len(converter.source_patterns) == 2
    assert converter.target_patterns == ["experts.gate_up"]
    assert [operation.dim for operation in converter.operations] == [0, 1]
    assert parameters(converter.add_tensor)[:4] == [
        "target_key",
        "source_key",
        "source_pattern",
        "future",
    ]
    assert parameters(converter.convert)[0] == "layer_name"
    assert {"model", "config"} <= set(parameters(converter.convert))


# --- building a model -------------------------------------------------------------------------


def test_mark_initialised():
    from transformers import initialization

    marked, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    compat.mark_initialised(marked)
    initialization.ones_(marked)
    initialization.ones_(other)
    assert not marked.any()
    assert other.all()


def test_supports_sdpa():
    assert isinstance(PreTrainedModel._supports_sdpa, bool)
    assert compat.supports_sdpa(OlmoeForCausalLM)


def test_attention_implementation(model):
    assert compat.attention_implementation(model.config) == "sdpa"


def test_dtype_plan(model):
    assert compat.dtype_plan(model, torch.bfloat16) == {}
    model._keep_in_fp32_modules_strict = {"gate"}
    assert compat.dtype_plan(model, torch.bfloat16) == {"gate": torch.float32}


def test_tied_weights(zoo_folder):
    config = AutoConfig.from_pretrained(zoo_folder("olmoe"))
    config.tie_word_embeddings = True
    model = compat.build_model(OlmoeForCausalLM, config, torch.float32)
    assert compat.tied_weights(model) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_router_recorders(model):
    declared = [found for part in model.modules() for found in compat.router_recorders(part)]
    kinds = {getattr(one, "target_class", one).__name__ for one in declared}
    assert kinds == {"OlmoeTopKRouter"}


# --- experts ----------------------------------------------------------------------------------


def test_set_experts_implementation(model):
    """The registered function is called with the arguments that ours expects."""
    seen = []

    def forward(module, x, chosen, weights):
        seen.append((module, x.dim(), chosen.shape == weights.shape))
        return torch.zeros_like(x)

    compat.register_experts("moemerge-test", forward)
    assert model.config._experts_implementation == compat.GROUPED
    assert any([compat.set_experts_implementation(m, "moemerge-test") for m in model.modules()])
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False)
    assert [call[1:] for call in seen] == [(2, True)] * model.config.num_hidden_layers
    assert compat.is_experts(seen[0][0])


def test_grouped_experts():
    assert parameters(moe.grouped_mm_experts_forward)[:4] == [
        "self",
        "hidden_states",
        "top_k_index",
        "top_k_weights",
    ]


def test_is_experts(model):
    experts = experts_of(model)
    for name in ("has_gate", "has_bias", "is_transposed"):
        assert isinstance(getattr(experts, name), bool), name
    assert not compat.is_experts(nn.Linear(2, 2))


def test_apply_gate(model):
    experts = experts_of(model)
    gate, up = torch.randn(5, 4), torch.randn(5, 4)
    wanted = nn.functional.silu(gate) * up
    assert torch.allclose(compat.apply_gate(experts, torch.cat([gate, up], dim=1)), wanted)


@pytest.mark.parametrize(("family", "default"), [("olmoe", True), ("gpt_oss", False)])
def test_has_default_gate(family, default, zoo_folder):
    config = AutoConfig.from_pretrained(zoo_folder(family))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    assert compat.has_default_gate(experts_of(model)) == default


# --- training ---------------------------------------------------------------------------------


def test_use_one_gpu(tmp_path):
    pytest.importorskip("accelerate", reason="needs the extra `tune`")
    arguments = TrainingArguments(output_dir=str(tmp_path))
    arguments._n_gpu = 4
    compat.use_one_gpu(arguments)
    assert arguments.n_gpu == 1


def test_trainer_methods_that_tuning_overrides():
    assert parameters(Trainer._save) == ["self", "output_dir", "state_dict"]
    assert parameters(Trainer._load_from_checkpoint) == ["self", "resume_from_checkpoint", "model"]


# --- torch ------------------------------------------------------------------------------------


def test_grouped_mm():
    rows = torch.randn(5, 16).bfloat16()
    weights = torch.randn(2, 16, 8).bfloat16()
    ends = torch.tensor([2, 5], dtype=torch.int32)
    found = torch_compat.grouped_mm(rows, weights, ends)
    wanted = torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[1]])
    assert torch.allclose(found.float(), wanted.float(), atol=0.1)


def test_record_offset(tmp_path):
    file = tmp_path / "weights.bin"
    value = torch.arange(300, dtype=torch.float32)
    torch.save({"weight": value}, file)
    loaded = torch.load(file, map_location="meta", weights_only=True)["weight"]
    if torch.__version__.startswith("2.9."):
        with pytest.raises(CheckpointError, match="cannot check that a pickled file is complete"):
            torch_compat.record_offset(loaded.untyped_storage())
        return
    begin = torch_compat.record_offset(loaded.untyped_storage())
    assert file.read_bytes()[begin : begin + 1200] == value.numpy().tobytes()
