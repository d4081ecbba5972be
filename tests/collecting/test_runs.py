"""Runs as a whole: layouts, repetition, interruption, refusals."""

import json
import resource
import threading

import pytest
import torch
from safetensors.torch import load_file

import moemerge
import multimodal_zoo
import processes
import zoo
from moemerge.checkpoint import Checkpoint
from moemerge.config.job_settings import CollectingSettings
from moemerge.errors import ArchitectureError, CheckpointError, DataError, NumericalError
from moemerge.families.architecture import Architecture
from moemerge.families.opened import open_model
from moemerge.runtime.progress import Silent
from moemerge.runtime.ranks import SINGLE
from moemerge.statistics import Statistics
from moemerge.statistics.collecting.forward import StateStore
from moemerge.statistics.collecting.job import CollectRequest, _forward_dtype, prepare
from moemerge.statistics.collecting.run import run_collect

KINDS = ("gram", "fisher")


def pairs(one, other):
    """The values of every unit in two files, which have the same units and tokens."""
    assert set(one.units) == set(other.units)
    for key in one.units:
        assert one.tokens(key) == other.tokens(key), key
        yield key, one.read(one.kind, key).values, other.read(other.kind, key).values


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_give_the_same_bytes(kind, model_folder, collect, tmp_path):
    for name in ("a", "b"):
        collect(model_folder("olmoe"), tmp_path / name, kind=kind, max_tokens=60)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    report = collect(model_folder("olmoe"), tmp_path / "c", kind=kind, max_tokens=60, seed=1)
    assert report.provenance.tokens == 60
    with Statistics.open(tmp_path / "a") as one, Statistics.open(tmp_path / "c") as other:
        assert one.provenance.data_fingerprint != other.provenance.data_fingerprint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_layouts_share_their_statistics(kind, family, model_folder, collect, tmp_path):
    """Stacked, transposed, interleaved on disk: the same units, the same values."""
    plain, fused = (model_folder(family, fused=fused) for fused in (False, True))
    collect(plain, tmp_path / "plain", kind=kind)
    collect(fused, tmp_path / "fused", kind=kind)
    with Statistics.open(tmp_path / "plain") as one, Statistics.open(tmp_path / "fused") as other:
        for key, ours, theirs in pairs(one, other):
            assert torch.equal(ours, theirs), key
        checkpoint = Checkpoint.open(fused)
        architecture = Architecture.of(checkpoint.config, checkpoint.tensors)
        one.check_fits("math", checkpoint, architecture)


def test_an_input_is_kept_once(model_folder, collect, tmp_path):
    collect(model_folder("olmoe"), tmp_path / "a")
    with Statistics.open(tmp_path / "a") as found:
        layer = "model.layers.1."
        where = {key: unit.tensor for key, unit in found.units.items()}
        attention = [where[f"{layer}self_attn.{name}_proj.weight"] for name in "qkvo"]
        assert len(set(attention[:3])) == 1
        assert attention[3] != attention[0]
        expert = f"{layer}mlp.experts.5."
        assert where[f"{expert}gate_proj.weight"] == where[f"{expert}up_proj.weight"]
        assert where[f"{expert}down_proj.weight"] != where[f"{expert}up_proj.weight"]


def test_an_expert_without_a_token_is_named(model_folder, collect, tmp_path):
    """One token goes to two of the eight experts of a layer."""
    for kind in KINDS:
        report = collect(model_folder("olmoe"), tmp_path / kind, kind=kind, limit=1, max_length=2)
        with Statistics.open(tmp_path / kind) as found:
            for key in report.unvisited_experts:
                assert found.tokens(key) == 0
                value = found.read(kind, key)
                assert value is not None
        assert len(report.unvisited_experts) >= 3 * 3 * (8 - 2 * zoo.TOP_K)


@pytest.mark.parametrize("kind", KINDS)
def test_states_on_disk_give_the_same_bytes(kind, model_folder, collect, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    collect(model_folder("qwen3_moe"), folder / "a", kind=kind)
    collect(model_folder("qwen3_moe"), folder / "b", kind=kind, offload="disk")
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]


def test_a_full_disk_is_told_and_left_clean(tmp_path):
    store = StateStore("disk", torch.device("cpu"), tmp_path)
    with processes.limited(resource.RLIMIT_FSIZE, 2**20):
        store.put((0, 0), torch.ones(1000))
        with pytest.raises(CheckpointError, match="cannot be written"):
            store.put((0, 1), torch.ones(2**20))
    store.close()
    assert not list(tmp_path.iterdir())


class Interrupting(Silent):
    """Ctrl-C while the second layer is at work."""

    def __init__(self, part):
        self._part = part
        self._now = ""

    def start(self, what, total, *, unit):
        self._now = what

    def advance(self, amount):
        if self._now == self._part:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "part"),
    [("gram", "streaming"), ("fisher", "streaming"), ("fisher", "gradients")],
)
def test_an_interrupted_run_leaves_nothing(kind, part, model_folder, text, tmp_path):
    settings = CollectingSettings(kind=kind, device="cpu", offload="disk")
    request = CollectRequest(model_folder("olmoe"), tmp_path / "a.stats", [text], settings)
    with pytest.raises(KeyboardInterrupt):
        run_collect(request, Interrupting(part))
    assert not list(tmp_path.iterdir())
    assert not [t for t in threading.enumerate() if t.name.startswith("moemerge")]


def test_the_dtype_of_the_forward(model_folder, text, tmp_path):
    """Float32 on a CPU, unless another one is asked for."""

    def dtype(stored, **settings):
        chosen = CollectingSettings(device="cpu", **settings)
        folder = model_folder("olmoe", dtype=stored)
        return prepare(
            CollectRequest(folder, tmp_path / "a", [text], chosen), SINGLE
        ).provenance.dtype

    assert dtype(torch.bfloat16) == "float32"
    assert dtype(torch.bfloat16, dtype="bfloat16", kind="fisher") == "bfloat16"


def test_gradients_of_float16_checkpoints_are_float32(model_folder):
    """They would underflow; other statistics use the checkpoint's dtype on a GPU."""
    model = open_model("model", model_folder("olmoe", dtype=torch.float16))
    gpu = torch.device("cuda")
    assert _forward_dtype(CollectingSettings(), model, gpu) == torch.float16
    assert _forward_dtype(CollectingSettings(kind="fisher"), model, gpu) == torch.float32
    asked = CollectingSettings(kind="fisher", dtype="float16")
    assert _forward_dtype(asked, model, gpu) == torch.float16


def test_a_tied_head_has_no_statistics(model_folder, collect, tmp_path):
    for kind in KINDS:
        collect(model_folder("qwen2_moe"), tmp_path / f"own-{kind}", kind=kind, limit=2)
        tied = model_folder("qwen2_moe", tie_word_embeddings=True)
        collect(tied, tmp_path / f"tied-{kind}", kind=kind, limit=2)
        own, shared = (Statistics.open(tmp_path / f"{name}-{kind}") for name in ("own", "tied"))
        with own, shared:
            assert set(own.units) - set(shared.units) == {"lm_head.weight"}
            assert not [key for key in shared.units if "embed" in key or "norm" in key]


def test_a_model_with_an_adapter_is_what_it_would_be_merged(model_folder, collect, tmp_path):
    base = model_folder("olmoe")
    lora = zoo.lora(tmp_path / "lora", base, "model.layers.0.self_attn.q_proj")
    adapted = f"{base}+{lora}"
    config = {"merge_method": "passthrough", "models": [{"model": adapted}]}
    moemerge.merge(config, tmp_path / "merged")
    collect(adapted, tmp_path / "a")
    collect(tmp_path / "merged", tmp_path / "b")
    collect(base, tmp_path / "c")
    first, second, without = (load_file(tmp_path / name) for name in "abc")
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, without[name]) for name, value in first.items())


# --- refusals -----------------------------------------------------------------------------------


def test_what_is_refused_before_the_model_is_read(model_folder, collect, text, tmp_path):
    olmoe = model_folder("olmoe")
    (tmp_path / "there").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="exists"):
        collect(olmoe, tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == b"mine"

    def request(*data):
        return CollectRequest(olmoe, tmp_path / "a", data, CollectingSettings(device="cpu"))

    bad = {(): "no text", ("words.txt",): "unknown kind", ("words.jsonl",): "no such file"}
    for data, words in bad.items():
        with pytest.raises(DataError, match=words):
            run_collect(request(*data), Silent())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_are_named(kind, model_folder, tmp_path):
    """Without padding, fused attention gives finite values for queries that are NaN."""
    name = "model.layers.1.self_attn.q_proj.weight"
    broken = zoo.spoilt(model_folder("olmoe"), tmp_path / "broken", name)
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "one plus two is three"}\n' * 3)
    settings = CollectingSettings(kind=kind, device="cpu")
    with pytest.raises(NumericalError, match=f"{name} holds NaN"):
        run_collect(CollectRequest(broken, tmp_path / "a.stats", [text], settings), Silent())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "text.jsonl"]


def test_rows_that_predict_nothing_are_refused(model_folder, tmp_path):
    text = tmp_path / "single.jsonl"
    text.write_text(json.dumps({"text": ""}) + "\n")  # one token: the tokenizer's own <s>
    settings = CollectingSettings(kind="fisher", device="cpu")
    request = CollectRequest(model_folder("olmoe"), tmp_path / "a", [text], settings)
    with pytest.raises(DataError, match="nothing to predict"):
        run_collect(request, Silent())


# Families without statistics, and how each is refused.
NONE = {
    **dict.fromkeys(
        ("dbrx", "jetmoe", "llama4_text", "longcat_flash", "step3p5"), "separated by expert"
    ),
    **dict.fromkeys(("doge", "zaya"), "not a single linear map"),
}
# Those without gradients.
FORWARD_ONLY = {
    "gemma4_text": "gradients cannot be sent back",
    **dict.fromkeys(("deepseek_v4", "glm5_next_text", "hy_v4"), "one norm after the last layer"),
}


@pytest.mark.parametrize("family", NONE)
def test_experts_that_cannot_be_told_apart_are_refused(family, model_folder, collect, tmp_path):
    for kind in KINDS:
        with pytest.raises(ArchitectureError, match=NONE[family]):
            collect(model_folder(family), tmp_path / "a", kind=kind)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", FORWARD_ONLY)
def test_a_model_that_hands_on_more_than_hidden_states_has_no_fisher_values(
    family, model_folder, collect, tmp_path
):
    folder = model_folder(family)
    for kind in ("fisher", "sensitivity"):
        with pytest.raises(ArchitectureError, match=FORWARD_ONLY[family]):
            collect(folder, tmp_path / "a", kind=kind)
    for kind in ("gram", "power"):
        collect(folder, tmp_path / kind, kind=kind, limit=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [f for f in (*zoo.FAMILIES, *multimodal_zoo.FAMILIES) if f not in {*NONE, *FORWARD_ONLY}],
)
def test_all_other_families_have_statistics(family, model_folder, collect, tmp_path):
    """A kind of the forward pass and one of gradients; the other kinds go the same ways."""
    for kind in KINDS:
        report = collect(model_folder(family), tmp_path / kind, kind=kind, limit=2)
        assert report.units > 0


# bfloat16 may send a token elsewhere; float32 does not.
TOLERANCE = 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gram", "fisher"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("offload", ["device", "cpu", "disk"])
def test_a_gpu_gives_what_a_cpu_gives(kind, family, offload, model_folder, collect, tmp_path):
    collect(model_folder(family), tmp_path / "cpu", kind=kind)
    collect(model_folder(family), tmp_path / "gpu", kind=kind, device="cuda", offload=offload)
    with Statistics.open(tmp_path / "cpu") as one, Statistics.open(tmp_path / "gpu") as other:
        for key, wanted, got in pairs(one, other):
            assert float((got - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max()), key


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gram", "fisher"])
def test_bfloat16_gives_two_runs_of_the_same_bytes(kind, model_folder, collect, tmp_path):
    for name in ("a", "b"):
        folder = model_folder("olmoe")
        collect(folder, tmp_path / name, kind=kind, device="cuda", dtype="bfloat16")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
