"""Weights in memory are what transformers itself would load, and go back to meta."""

import threading
import time

import pytest
import torch

import multimodal_zoo
import quantised_zoo as qz
import zoo
from forward import reference
from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import ArchitectureError, CheckpointError, NumericalError
from moemerge.families.architecture import Architecture
from moemerge.forward.loading import build_skeleton, map_names
from moemerge.forward.routers import anatomy
from moemerge.forward.weights import Weights

CPU = torch.device("cpu")
EVERY = (*zoo.FAMILIES, *multimodal_zoo.FAMILIES)


def opened(folder, dtype=torch.float32, device=CPU):
    checkpoint = Checkpoint.open(folder)
    return Weights(build_skeleton(checkpoint, dtype), checkpoint, device, dtype)


def loaded(folder, dtype=torch.float32, device=CPU):
    weights = opened(folder, dtype, device)
    names = tuple(weights.model.state_dict())
    weights.place(weights.fetch(names))
    weights.check(names, "the model")
    weights.close()
    return weights


@pytest.mark.parametrize("family", [f for f in zoo.FAMILIES if f != "zaya"])
def test_every_tensor_is_what_transformers_loads(family, zoo_folder):
    folder = zoo_folder(family)
    model = loaded(folder).model
    whole = reference.whole_model(folder)
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", qz.KINDS)
def test_a_gpu_decodes_what_a_cpu_decodes(kind, dtype, zoo_folder, tmp_path):
    form = qz.KINDS[kind]
    folder = form.publish(zoo_folder(form.family, dtype=dtype, **form.sizes), tmp_path / "model")
    expected = loaded(folder, dtype).model.state_dict()
    found = loaded(folder, dtype, torch.device("cuda")).model.state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value), name


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "deepseek_v3", "ernie4_5_moe", "flint"])
def test_what_a_family_keeps_in_float32(family, zoo_folder):
    folder = zoo_folder(family, dtype=torch.bfloat16)
    model = loaded(folder, torch.bfloat16).model
    whole = reference.whole_model(folder, torch.bfloat16)
    for name, value in whole.state_dict().items():
        assert model.state_dict()[name].dtype == value.dtype, name
        assert torch.equal(model.state_dict()[name], value), name


def test_skeleton_has_real_buffers_and_leaves_the_random_state_alone(zoo_folder):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    model = build_skeleton(Checkpoint.open(zoo_folder("olmoe")), torch.float32)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(value.device.type == "meta" for value in model.parameters())
    assert all(value.device.type == "cpu" for value in model.buffers())
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"  # outside nothing has changed


def test_free_gives_the_memory_back(zoo_folder):
    weights = loaded(zoo_folder("olmoe"))
    names = weights.names_under("model.layers.1")
    size = weights.nbytes("model.layers.1")
    layer = weights.model.get_submodule("model.layers.1")
    assert size == sum(p.numel() * 4 for p in layer.parameters())
    weights.free(names)
    assert all(p.device.type == "meta" for p in layer.parameters())
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..* and \d+ more \(in layer 1\)"):
        weights.check(names, "layer 1")


def test_tied_embeddings_share_one_tensor(zoo_folder):
    folder = zoo_folder("qwen2_moe", tie_word_embeddings=True)
    assert "lm_head.weight" not in Checkpoint.open(folder).tensors
    model = loaded(folder).model
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr()


def test_unknown_tensors_are_left_alone(zoo_folder, tmp_path):
    def add_mtp(tensors):
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(2, 2)

    folder = reference.changed(zoo_folder("deepseek_v3"), tmp_path / "mtp", add_mtp).path
    assert loaded(folder).names.unused == ("model.layers.3.eh_proj.weight",)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.q_proj.weight", (3, 32)),
        ("model.layers.1.mlp.experts.0.up_proj.weight", (3, 32)),
        ("model.layers.1.mlp.experts.2.up_proj.weight", (3, 32)),
        ("model.layers.1.mlp.gate.weight", (3, 32)),
    ],
)
def test_wrong_shapes_name_the_tensor(name, shape, zoo_folder, tmp_path):
    def resize(tensors):
        tensors[name] = torch.zeros(shape)

    folder = reference.changed(zoo_folder("olmoe"), tmp_path / "shape", resize).path
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\."):
        loaded(folder)


def test_a_missing_expert_is_told(zoo_folder, tmp_path):
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    folder = reference.changed(zoo_folder("olmoe"), tmp_path / "lost", lambda t: t.pop(lost)).path
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        loaded(folder)


def test_two_layouts_in_one_folder(zoo_folder, tmp_path):
    def both(tensors):
        gate = tensors["model.layers.0.block_sparse_moe.gate.weight"]
        tensors["model.layers.0.mlp.gate.weight"] = gate.clone()

    checkpoint = reference.changed(zoo_folder("mixtral"), tmp_path / "two", both)
    with pytest.raises(CheckpointError, match="mixes two layouts"):
        map_names(build_skeleton(checkpoint, torch.float32), checkpoint)


def edited(folder, out, **values):
    reference.changed(folder, out, lambda tensors: None)
    zoo.edit_config(out, **values)
    return Checkpoint.open(out)


def test_models_that_cannot_be_streamed(zoo_folder, tmp_path):
    folder = zoo_folder("olmoe")
    unknown = edited(folder, tmp_path / "a", model_type="nobody_knows")
    with pytest.raises(ArchitectureError, match="does not know this model"):
        build_skeleton(unknown, torch.float32)
    quantised = edited(folder, tmp_path / "b", quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="is quantised"):
        build_skeleton(quantised, torch.float32)
    nameless = edited(folder, tmp_path / "c", architectures=None)
    assert type(build_skeleton(nameless, torch.float32)).__name__ == "OlmoeForCausalLM"


def test_reading_ahead_is_used_or_thrown_away(zoo_folder):
    weights = opened(zoo_folder("olmoe"))
    first, second = (weights.names_under(f"model.layers.{n}") for n in (0, 1))
    weights.prefetch("one", second)
    weights.prefetch("zero", first)  # one part at most: ignored
    assert weights.fetched("one", second).keys() == set(second)
    weights.prefetch("one", second)
    assert weights.fetched("zero", first).keys() == set(first)
    weights.close()


def test_closing_does_not_wait_for_a_whole_part(zoo_folder):
    class Slow(Checkpoint):
        """Takes its time with every tensor, so that few are read when the end comes."""

        begun = threading.Event()
        reads = 0

        def read(self, *args, **kwargs):
            Slow.reads += 1
            Slow.begun.set()
            time.sleep(0.02)
            return super().read(*args, **kwargs)

    checkpoint = Slow(zoo_folder("olmoe"))
    weights = Weights(build_skeleton(checkpoint, torch.float32), checkpoint, CPU, torch.float32)
    weights.prefetch("all", tuple(weights.model.state_dict()))
    assert Slow.begun.wait(10)
    weights.close()
    assert Slow.reads < len(checkpoint.tensors) // 2


def test_a_head_that_is_not_run_is_checked(zoo_folder, tmp_path):
    def poison(tensors):
        tensors["lm_head.weight"][3, 1] = torch.nan

    weights = opened(reference.changed(zoo_folder("olmoe"), tmp_path / "nan", poison).path)
    told = r"lm_head\.weight holds NaN or infinity, in .*model\.safetensors"
    with pytest.raises(NumericalError, match=told):
        weights.require_finite_on_disk(["lm_head.weight"])
    weights.require_finite_on_disk(["model.norm.weight"])
    weights.close()


@pytest.mark.parametrize("family", [f for f in EVERY if f not in ("zaya", "doge")])
def test_modules_and_tables_agree(family, zoo_folder):
    checkpoint = Checkpoint.open(zoo_folder(family))
    table = Architecture.of(checkpoint.config, checkpoint.tensors)
    model = build_skeleton(checkpoint, torch.float32)
    names = map_names(model, checkpoint)
    found = {
        (r.layer, names.on_disk(r.weight), None if r.bias is None else names.on_disk(r.bias))
        for r in anatomy(model).routers
    }
    served = {(place.layer, place.weight, place.bias) for place in table.routers() if place.served}
    assert found == served
    assert found
