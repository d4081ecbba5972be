"""Units, keys, layers and routers of every family's tiny checkpoint, in every layout."""

import time
from dataclasses import dataclass

import pytest
import torch

import multimodal_zoo
import zoo
from moemerge.errors import ArchitectureError
from moemerge.families.architecture import Architecture
from moemerge.families.families import family_of
from moemerge.families.roles import Role
from moemerge.families.rules import ConfigKey, Experts, Family, GateRule, Router

FAMILIES = zoo.FAMILIES
EVERY = (*FAMILIES, *multimodal_zoo.FAMILIES)


@dataclass(frozen=True)
class Info:
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


def open_folder(folder):
    tensors = zoo.tensors(folder)
    return Architecture.of(zoo.read_config(folder), tensors), tensors


def block(tensor, unit):
    rows = unit.slot.rows
    return tensor if rows is None else tensor[rows[0] : rows[1]]


def units_by_key(folder):
    architecture, tensors = open_folder(folder)
    found = {}
    for name, tensor in tensors.items():
        for unit in architecture.units(name):
            assert unit.key not in found
            found[unit.key] = (unit, unit.slot.take(block(tensor, unit)))
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model_type", EVERY)
def test_units_cover_every_tensor_once(zoo_folder, model_type, fused):
    architecture, tensors = open_folder(zoo_folder(model_type, fused=fused))
    for name, tensor in tensors.items():
        count = torch.zeros(tensor.shape, dtype=torch.int32)
        for unit in architecture.units(name):
            assert unit.tensor == name
            view = unit.slot.take(block(count, unit))
            assert tuple(view.shape) == unit.shape
            view += 1
        assert (count == 1).all(), name


@pytest.mark.parametrize("model_type", EVERY)
def test_layouts_pair_up_by_key(zoo_folder, model_type):
    """The same model saved in both layouts gives the same units, value by value."""
    both = [units_by_key(zoo_folder(model_type, fused=fused)) for fused in (False, True)]
    if model_type in multimodal_zoo.FAMILIES:  # the model of images has names of its own
        both = [{k: one[k] for k in one if one[k][0].layer is not None} for one in both]
    disk, fused = both
    assert disk.keys() == fused.keys()
    for key, (unit, value) in disk.items():
        other, again = fused[key]
        assert torch.equal(value, again), key
        same = (unit.role, unit.layer, unit.expert, unit.projection, unit.shape)
        assert same == (other.role, other.layer, other.expert, other.projection, other.shape), key


@pytest.mark.parametrize("model_type", FAMILIES)
def test_base_only_checkpoint_pairs_up(zoo_folder, model_type):
    whole = units_by_key(zoo_folder(model_type))
    base = units_by_key(zoo_folder(model_type, base_only=True))
    heads = {key for key, (unit, _) in whole.items() if unit.role is Role.HEAD}
    assert base.keys() == whole.keys() - heads


@pytest.mark.parametrize("model_type", EVERY)
def test_original_names_are_their_own_keys(zoo_folder, model_type):
    """What the family's own checkpoints call a tensor is its key, unless it is a stack."""
    architecture, tensors = open_folder(zoo_folder(model_type))
    for name in tensors:
        units = architecture.units(name)
        if len(units) == 1 and "vision" not in name:
            assert units[0].key == name == architecture.key(name)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_roles(zoo_folder, model_type):
    architecture, tensors = open_folder(zoo_folder(model_type))
    roles = {}
    for name in tensors:
        roles.setdefault(architecture.role(name), []).append(name)
    assert len(roles[Role.EMBEDDING]) == (2 if model_type == "gemma4_text" else 1)
    assert len(roles.get(Role.HEAD, ())) == (0 if architecture.tied else 1)
    assert all("expert" in n or "_linear" in n or "_embed" in n for n in roles[Role.EXPERT])
    for name in roles.get(Role.SHARED_EXPERT, ()):
        assert "shared" in name
    assert all(tensors[name].dim() == 1 or "W_" in name for name in roles[Role.NORM])
    missed = [n for n in roles.get(Role.OTHER, ()) if "proj.weight" in n and "per_layer" not in n]
    assert not missed
    mixers = ("attn", "attention", "mamba", "mixer", "conv")
    assert all(any(word in n for word in mixers) for n in roles[Role.ATTENTION])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_experts_of_a_layer(zoo_folder, model_type, fused):
    if model_type == "doge":
        pytest.skip("its experts are rows of an embedding, merged as one tensor")
    units = [unit for unit, _ in units_by_key(zoo_folder(model_type, fused=fused)).values()]
    experts = [u for u in units if u.role is Role.EXPERT and u.key.endswith(".weight")]
    layer = experts[-1].layer
    for projection in {u.projection for u in experts}:
        one = [u.expert for u in experts if (u.layer, u.projection) == (layer, projection)]
        count = 8 if model_type != "longcat_flash" or projection == "down" else 10
        if model_type == "jetmoe" and projection != "gate":
            count = 16  # attention experts have the same two words
        assert len(one) == count
        assert set(one) == set(range(8 if model_type == "jetmoe" else count))
    shapes = {u.projection: u.shape for u in experts if "self_attention" not in u.key}
    assert shapes["up"] == tuple(reversed(shapes["down"]))
    assert zoo.HIDDEN in shapes["down"] or model_type == "nemotron_h"


def test_expert_keys_are_in_the_family_s_spelling(zoo_folder):
    expected = {
        "olmoe": "model.layers.1.mlp.experts.3.gate_proj.weight",
        "mixtral": "model.layers.1.block_sparse_moe.experts.3.w1.weight",
        "gpt_oss": "model.layers.1.mlp.experts.3.gate_proj.bias",
        "granitemoe": "model.layers.1.block_sparse_moe.experts.3.down_proj.weight",
        "dbrx": "transformer.blocks.1.ffn.experts.3.v1.weight",
        "nemotron_h": "backbone.layers.1.mixer.experts.3.up_proj.weight",
        "jetmoe": "model.layers.1.self_attention.experts.3.input_linear.weight",
    }
    for model_type, key in expected.items():
        assert key in units_by_key(zoo_folder(model_type, fused=True))


def test_gpt_oss_halves_are_what_the_forward_uses(zoo_folder):
    folder = zoo_folder("gpt_oss")
    stored = zoo.tensors(folder)["model.layers.0.mlp.experts.gate_up_proj"]
    units = units_by_key(folder)
    gate = units["model.layers.0.mlp.experts.5.gate_proj.weight"][1]
    up = units["model.layers.0.mlp.experts.5.up_proj.weight"][1]
    x = torch.randn(4, zoo.HIDDEN)
    both = x @ stored[5]
    torch.testing.assert_close(torch.nn.functional.linear(x, gate), both[..., ::2])
    torch.testing.assert_close(torch.nn.functional.linear(x, up), both[..., 1::2])


def test_dbrx_flat_matrices(zoo_folder):
    folder = zoo_folder("dbrx")
    stored = zoo.tensors(folder)["transformer.blocks.2.ffn.experts.mlp.w2"]
    unit, down = units_by_key(folder)["transformer.blocks.2.ffn.experts.1.w2.weight"]
    assert (unit.slot.rows, unit.shape) == ((24, 48), (32, 24))
    assert torch.equal(down, stored[24:48].T)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_at_layer(zoo_folder, model_type):
    architecture, tensors = open_folder(zoo_folder(model_type))
    for name in tensors:
        layer = architecture.layer_of(name)
        moved = architecture.at_layer(name, 17)
        if layer is None:
            assert moved == name
        else:
            assert f".{layer}." in name
            assert architecture.at_layer(name, layer) == name
            assert moved.replace(".17.", f".{layer}.", 1) == name
    found = {n for name in tensors if (n := architecture.layer_of(name)) is not None}
    assert found == set(range(architecture.num_layers))


def test_layer_key(zoo_folder):
    for model_type, count, lists in (
        ("olmoe", "num_hidden_layers", ()),
        ("dbrx", "n_layers", ()),
        ("longcat_flash", "num_layers", ()),
        ("mellum", "num_hidden_layers", ("layer_types", "mlp_layer_types")),
        ("llama4_text", "num_hidden_layers", ("layer_types", "no_rope_layers")),
        ("nemotron_h", None, ("layers_block_type",)),
    ):
        key = open_folder(zoo_folder(model_type))[0].layer_key
        assert count is None or count in key.count
        assert set(lists) <= set(key.lists), model_type
        assert "moe_layers" not in key.lists


def test_a_key_may_count_a_layer_twice(zoo_folder):
    """LongCat-Flash has two attentions in a layer, and may count those besides."""
    folder = zoo_folder("longcat_flash")
    config, tensors = zoo.read_config(folder), zoo.tensors(folder)
    layers = Architecture.of(config, tensors).num_layers
    both = {**config, "num_layers": layers, "num_hidden_layers": 2 * layers}
    alone = {k: v for k, v in both.items() if k != "num_layers"}
    assert layers == len({p.layer for p in Architecture.of(both, tensors).routers()})
    for told in (both, alone):
        architecture = Architecture.of(told, tensors)
        assert architecture.num_layers == layers
        assert architecture.layer_key.count["num_hidden_layers"] == 2


@pytest.mark.parametrize("model_type", FAMILIES)
def test_numbers_of_the_config(zoo_folder, model_type):
    architecture, tensors = open_folder(zoo_folder(model_type))
    assert architecture.model_type == model_type
    assert architecture.num_experts == (16 if model_type == "doge" else zoo.EXPERTS)
    assert architecture.quantised is None
    assert architecture.notice is None
    named = architecture.embedding_names()
    assert named.input is not None
    assert tensors[named.input].shape == (zoo.VOCAB, zoo.HIDDEN)
    tied = getattr(zoo.config(model_type), "tie_word_embeddings", False)
    assert (named.head is None) == architecture.tied == tied


@pytest.mark.parametrize("model_type", multimodal_zoo.FAMILIES)
def test_a_text_model_that_has_a_head_only_beside_a_model_of_images(zoo_folder, model_type):
    folder = zoo_folder(model_type)
    architecture, _ = open_folder(folder)
    assert architecture.family is family_of(model_type)
    assert architecture.family is family_of(zoo.read_config(folder)["model_type"])
    assert (architecture.num_layers, architecture.num_experts) == (3, zoo.EXPERTS)
    assert architecture.notice is None
    assert architecture.layer_key.section == ("text_config",)
    assert [place.served for place in architecture.routers()] == [True, True]
    units = [unit for unit, _ in units_by_key(folder).values()]
    roles = [unit.role for unit in units if unit.layer is not None]
    assert roles.count(Role.ROUTER) == 2
    assert roles.count(Role.EXPERT) == 2 * 3 * zoo.EXPERTS
    assert roles.count(Role.SHARED_EXPERT) == (0 if model_type == "muse_spark_text" else 6)
    assert roles.count(Role.MLP) == (7 if model_type == "muse_spark_text" else 3)
    assert [unit.role for unit in units].count(Role.HEAD) == 1


def test_rows_of_routers_with_more_than_the_experts(zoo_folder):
    inkling, tensors = open_folder(zoo_folder("inkling_text"))
    place = inkling.routers()[0]
    assert (tensors[place.weight].shape[0], place.rows) == (10, 8)
    assert {p.rows for p in open_folder(zoo_folder("longcat_flash"))[0].routers()} == {10}


def test_routers_that_are_not_served_say_why(zoo_folder):
    v4 = open_folder(zoo_folder("deepseek_v4"))[0]
    assert [place.served for place in v4.routers()] == [False, True, True]
    assert "hash-routed" in str(v4.routers()[0].reason)
    assert v4.role("model.layers.0.ffn.gate.tid2eid") is Role.ROUTER
    for model_type in ("zaya", "doge"):
        places = open_folder(zoo_folder(model_type))[0].routers()
        assert places
        assert not any(place.served for place in places)
        assert all(place.reason for place in places)


def test_gate_by_layer(zoo_folder):
    architecture = open_folder(zoo_folder("deepseek_v3"))[0]
    assert architecture.gate(0) is None
    gate = architecture.gate(1)
    assert (gate.top_k, gate.groups, gate.top_groups) == (2, 2, 1)


# --- checkpoints that transformers does not write here -------------------------------------------
def test_multi_token_prediction_layers_are_read_and_passed_over(zoo_folder):
    folder = zoo_folder("deepseek_v3")
    tensors = dict(zoo.tensors(folder))
    for name in list(tensors):
        if ".layers.2." in name:
            tensors[name.replace(".layers.2.", ".layers.3.")] = tensors[name]
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(32, 64)
    tensors["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(24, 32)
    architecture = Architecture.of(zoo.read_config(folder), tensors)
    assert [p.layer for p in architecture.routers() if p.served] == [1, 2]
    assert "beyond" in str(architecture.routers()[-1].reason)
    assert architecture.num_layers == 3
    assert architecture.role("model.layers.3.eh_proj.weight") is Role.OTHER
    assert architecture.role("mtp.layers.0.mlp.experts.0.up_proj.weight") is Role.EXPERT
    assert architecture.layer_of("mtp.layers.0.mlp.experts.0.up_proj.weight") is None


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_multimodal_wrapper_pairs_up_with_its_text_model(zoo_folder, prefix):
    folder = zoo_folder("qwen3_5_moe_text")
    text = zoo.tensors(folder)
    wrapped = {
        name if name.startswith("lm_head") else prefix + name.removeprefix("model."): tensor
        for name, tensor in text.items()
    }
    wrapped["model.visual.blocks.0.mlp.fc1.weight"] = torch.zeros(4, 4)
    config = {"model_type": "qwen3_5_moe", "text_config": zoo.read_config(folder)}
    whole = Architecture.of(config, wrapped)
    assert whole.family is Architecture.of(zoo.read_config(folder), text).family
    assert whole.layer_key.section == ("text_config",)
    assert whole.num_layers == 3
    keys = {unit.key for name in wrapped for unit in whole.units(name)}
    assert keys == {*text, "model.visual.blocks.0.mlp.fc1.weight"}
    assert whole.layer_of("model.visual.blocks.0.mlp.fc1.weight") is None
    first = whole.routers()[0]
    assert first.weight == f"{prefix}layers.0.mlp.gate.weight"
    assert whole.at_layer(first.weight, 9) == f"{prefix}layers.9.mlp.gate.weight"


def test_qwen3_vl_stacks_are_told_apart_by_the_hidden_size():
    config = {"model_type": "qwen3_vl_moe", "text_config": {
        "model_type": "qwen3_vl_moe_text", "hidden_size": 32, "num_experts": 4,
        "num_hidden_layers": 1, "num_experts_per_tok": 2}}  # fmt: skip
    root = "model.language_model.layers.0.mlp.experts."
    for up, down in (((4, 32, 96), (4, 48, 32)), ((4, 96, 32), (4, 32, 48))):
        tensors = {root + "gate_up_proj": Info(up), root + "down_proj": Info(down)}
        architecture = Architecture.of(config, tensors)
        shapes = {u.projection: u.shape for name in tensors for u in architecture.units(name)}
        assert shapes == {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}


def test_minimax_m3_vision_checkpoint_pairs_up_with_the_text_model(zoo_folder):
    """The multimodal original stores experts one by one and gate and up apart."""
    text = open_folder(zoo_folder("minimax_m3_vl_text"))[0]
    names = ("gate_proj", "up_proj", "down_proj")
    wrap = "language_model.model.layers."
    tensors = {f"{wrap}0.mlp.{p}.weight": Info((48, 32)) for p in names}
    for layer in (1, 2):
        block_ = f"{wrap}{layer}.block_sparse_moe."
        tensors |= {f"{block_}shared_experts.{p}.weight": Info((24, 32)) for p in names}
        tensors |= {
            f"{block_}experts.{e}.{w}.weight": Info((48, 32))
            for e in range(8)
            for w in ("w1", "w2", "w3")
        }
        tensors[f"{block_}gate.weight"] = Info((8, 32))
        tensors[f"{block_}e_score_correction_bias"] = Info((8,))
    config = {"model_type": "minimax_m3_vl", "text_config": text.config}
    wrapped = Architecture.of(config, tensors)
    theirs = {unit.key for name in tensors for unit in wrapped.units(name)}
    ours = units_by_key(zoo_folder("minimax_m3_vl_text")).keys()
    assert theirs == {key for key in ours if ".mlp." in key}


def test_dense_model_and_its_base(tmp_path):
    architecture, tensors = open_folder(zoo.dense_llama(tmp_path, tied=True))
    assert architecture.family is None
    assert architecture.notice is None
    assert not architecture.is_moe
    assert architecture.routers() == ()
    assert (architecture.num_layers, architecture.num_experts) == (4, None)
    assert architecture.tied
    assert architecture.embedding_names().input == "model.embed_tokens.weight"
    roles = {architecture.role(name) for name in tensors}
    assert roles == {Role.EMBEDDING, Role.NORM, Role.ATTENTION, Role.MLP}
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    base = Architecture.of(architecture.config, bare)
    assert {base.key(name) for name in bare} == set(tensors)


def test_gpt2_names():
    tensors = {
        name: Info((8, 8))
        for name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight",
                     "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.ln_1.weight",
                     "transformer.ln_f.weight")
    }  # fmt: skip
    architecture = Architecture.of({"model_type": "gpt2", "n_layer": 1}, tensors)
    assert [architecture.role(n) for n in tensors] == [
        Role.EMBEDDING, Role.ATTENTION, Role.MLP, Role.NORM, Role.NORM]  # fmt: skip
    bare = {name.removeprefix("transformer."): info for name, info in tensors.items()}
    base = Architecture.of({"model_type": "gpt2", "n_layer": 1}, bare)
    assert [base.key(name) for name in bare] == list(tensors)


def test_unknown_moe_is_read_tensor_by_tensor_with_a_notice():
    tensors = {
        "model.layers.0.mlp.gate.weight": Info((4, 8)),
        "model.layers.0.mlp.experts.0.up_proj.weight": Info((8, 8)),
        "model.layers.0.mlp.experts.gate_up_proj": Info((4, 16, 8)),
        "model.layers.0.strange.weight": Info((3,)),
    }
    architecture = Architecture.of({"model_type": "grok9", "num_experts": 4}, tensors)
    assert "grok9" in str(architecture.notice)
    assert all(len(architecture.units(name)) == 1 for name in tensors)
    roles = [architecture.role(name) for name in tensors]
    assert roles == [Role.ROUTER, Role.EXPERT, Role.EXPERT, Role.OTHER]
    assert architecture.routers() == ()


def test_recognised_by_class_where_the_model_type_is_missing():
    name = "model.layers.0.mlp.gate.weight"
    config = {"architectures": ["OlmoeForCausalLM"], "num_hidden_layers": 1}
    found = Architecture.of(config, {name: Info((8, 8))})
    assert found.model_type == "olmoe"
    assert found.routers()[0].gate is not None


def test_two_tensors_never_share_a_key():
    names = (
        "model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
    )
    architecture = Architecture.of({"model_type": "llama"}, {n: Info((2, 2)) for n in names})
    assert {architecture.key(name) for name in names} == set(names)


def test_unknown_name_is_refused():
    with pytest.raises(ArchitectureError, match="no tensor 'nowhere'"):
        Architecture.of({"model_type": "olmoe"}, {}).units("nowhere")


def test_deepseek_v3_s_names_are_read_quickly():
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": Info((2048, 7168))
        for layer in range(3, 61)
        for expert in range(256)
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 256}
    start = time.process_time()
    architecture = Architecture.of(config, tensors)
    units = [unit for name in tensors for unit in architecture.units(name)]
    assert len(units) == len(tensors) == 44_544
    assert time.process_time() - start < 3.0  # about 0.7 s on a quiet machine


def test_a_row_may_call_experts_and_their_number_as_it_likes():
    family = Family(
        ("toy_moe",),
        "Toy",
        GateRule(top_k=ConfigKey(("toys_per_token",), 1)),
        routers=(Router("mlp.router.weight"),),
        experts=(Experts("mlp.toys", ("w1", "w3", "w2")),),
        expert_counts=("num_toys",),
    )
    config = {"hidden_size": 4, "num_hidden_layers": 1, "num_toys": 2, "toys_per_token": 1}
    prefix = "model.layers.0.mlp"
    names = [f"{prefix}.toys.{n}.{w}.weight" for n in (0, 1) for w in ("w1", "w2", "w3")]
    tensors = {name: Info((4, 4)) for name in names} | {f"{prefix}.router.weight": Info((2, 4))}
    toy = Architecture(config, tensors, family=family, section=(), model_type="toy_moe")
    assert toy.num_experts == 2
    read = [(u.key, u.role, u.expert, u.projection) for name in names for u in toy.units(name)]
    assert read == [
        (name, Role.EXPERT, int(name.split(".")[5]), {"w1": "gate", "w2": "down", "w3": "up"}[w])
        for name in names
        for w in [name.split(".")[6]]
    ]
    stack = {
        f"{prefix}.toys.gate_up_proj": Info((2, 8, 4)),
        f"{prefix}.router.weight": Info((2, 4)),
    }
    fused = Architecture(config, stack, family=family, section=(), model_type="toy_moe")
    units = fused.units(f"{prefix}.toys.gate_up_proj")
    assert [unit.key for unit in units] == [n for n in names if ".w2." not in n]
    with pytest.raises(ArchitectureError, match="counts 3 experts"):
        Architecture(
            config | {"num_toys": 3}, tensors, family=family, section=(), model_type="toy_moe"
        )
