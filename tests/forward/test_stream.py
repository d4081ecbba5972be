"""The stream gives the whole model's features, and lets go of everything it took."""

import dataclasses
import gc
import re
import threading
import weakref

import pytest
import torch

import multimodal_zoo
import zoo
from forward import reference
from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import (
    ArchitectureError,
    CheckpointError,
    DataError,
    NumericalError,
)
from moemerge.forward.settings import StreamSettings
from moemerge.forward.stream import ModelStream
from moemerge.forward.tokens import finite
from moemerge.text.batches import Batch, make_batches
from moemerge.text.domains import Domain

NOT_SERVED = ("zaya", "doge")
EVERY = (*zoo.FAMILIES, *multimodal_zoo.FAMILIES)
SERVED = tuple(name for name in EVERY if name not in NOT_SERVED)


def stream_all(folder, batches, **options):
    """Every stop's inputs, in the order of the batches."""
    found = {}
    names = {field.name for field in dataclasses.fields(StreamSettings)}
    settings = StreamSettings(**{n: v for n, v in options.items() if n in names})
    others = {n: v for n, v in options.items() if n not in names}
    with ModelStream(Checkpoint.open(folder), batches, settings, **others) as stream:
        for stop in reference.routers(stream):
            found[stop.path] = reference.inputs_of(stop)
    return found


def assert_same(found, expected):
    assert list(found) == list(expected)  # the order of execution too
    for path, tensors in expected.items():
        for got, want in zip(found[path], tensors, strict=True):
            assert torch.equal(got, want), path


@pytest.fixture
def batch_threads():
    """The threads that streams of this test have started. Another test's may still be ending."""
    before = set(threading.enumerate())

    def names():
        since = set(threading.enumerate()) - before
        return [thread.name for thread in since if thread.name.startswith("moemerge-")]

    return names


@pytest.mark.parametrize("family", SERVED)
def test_features_are_those_of_the_whole_model(family, zoo_folder):
    folder = zoo_folder(family)
    batches = reference.batches()
    assert any(batch.padded for batch in batches)
    assert not all(batch.padded for batch in batches)
    found = stream_all(folder, batches)
    assert found
    model = reference.whole_model(folder)
    expected, whole = reference.run_whole(model, tuple(found), batches)
    assert_same(found, expected)
    # Offloaded to disk, with the logits.
    logits = []
    found = stream_all(
        folder,
        batches,
        offload="disk",
        spill_smallest=0,
        output="logits",
        on_output=lambda batch, value: logits.append(value),
    )
    assert_same(found, expected)
    for batch, got, want in zip(batches, logits, whole, strict=True):
        assert torch.equal(got[batch.mask], want[batch.mask])


@pytest.mark.parametrize(
    "family", ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "jetmoe", "glm_moe_dsa"]
)
def test_replaced_routers_act_from_there_on(family, zoo_folder):
    folder = zoo_folder(family)
    batches = reference.batches()
    new = {}
    found = {}
    biases = {}
    generator = torch.Generator().manual_seed(5)
    with ModelStream(Checkpoint.open(folder), batches) as stream:
        parameters = {router.path: router for router in stream.anatomy.routers}
        for stop in reference.routers(stream):
            found[stop.path] = reference.inputs_of(stop)
            # A weight that depends on the inputs, as a calibrated one does.
            noise = torch.randn(stop.weight.shape, generator=generator)
            mean = torch.cat(found[stop.path]).mean(0)
            new[stop.path] = stop.weight + 0.5 * noise * mean
            if stop.bias is not None:
                biases[stop.path] = stop.bias + 1
            tensors = {stop.weight_name: new[stop.path]}
            if stop.bias is not None:
                tensors[stop.weight_name.replace("weight", "bias")] = biases[stop.path]
            stream.put(tensors)
    model = reference.whole_model(folder)
    unchanged, _ = reference.run_whole(model, tuple(found), batches)
    with torch.no_grad():
        for path, weight in new.items():
            model.get_parameter(parameters[path].weight).copy_(weight)
        for path, bias in biases.items():
            model.get_parameter(parameters[path].bias).copy_(bias)
    expected, _ = reference.run_whole(model, tuple(found), batches)
    assert_same(found, expected)
    last = list(found)[-1]
    assert not torch.equal(found[last][0], unchanged[last][0])
    assert (family == "gpt_oss") == bool(biases)


@pytest.mark.parametrize(
    "options",
    [{"fused": True}, {"base_only": True}, {"shard_size": "20KB"}, {"tie_word_embeddings": True}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_other_layouts_on_disk(family, options, zoo_folder):
    folder = zoo_folder(family, **options)
    batches = reference.batches()
    collected = []
    found = {}
    causal = "base_only" not in options
    with ModelStream(
        Checkpoint.open(folder),
        batches,
        output="logits" if causal else "hidden",
        on_output=lambda batch, value: collected.append(value),
    ) as stream:
        for stop in reference.routers(stream):
            assert stop.weight_name in stream.checkpoint.tensors
            assert torch.equal(stream.checkpoint.read(stop.weight_name), stop.weight)
            found[stop.path] = reference.inputs_of(stop)
    assert len(collected) == len(batches)
    if causal:
        expected, logits = reference.run_whole(reference.whole_model(folder), tuple(found), batches)
        assert_same(found, expected)
        assert all(map(torch.equal, collected, logits))
    else:
        with torch.no_grad():
            for batch, got in zip(batches, collected, strict=True):
                mask = batch.mask.long() if batch.padded else None
                want = reference.whole_model(folder)(
                    input_ids=batch.input_ids, attention_mask=mask, use_cache=False
                )
                assert torch.equal(got, want.last_hidden_state)


def test_bfloat16_checkpoint_and_dtype(zoo_folder):
    folder = zoo_folder("deepseek_v3", dtype=torch.bfloat16)
    batches = reference.batches()
    for dtype in (torch.bfloat16, torch.float32):
        found = stream_all(folder, batches, dtype=dtype)
        whole = reference.whole_model(folder, dtype)
        expected, _ = reference.run_whole(whole, tuple(found), batches)
        assert_same(found, expected)


def test_a_part_of_a_parameter_is_not_replaced(zoo_folder):
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), reference.batches()) as stream:
        stop = next(reference.routers(stream))
        with pytest.raises(CheckpointError, match="no parameter of its own"):
            stream.put({"model.layers.0.mlp.experts.0.up_proj.weight": stop.weight})


def test_padding_is_left_out_and_domains_stay_apart(zoo_folder):
    rows = reference.domains()
    batches = reference.batches()
    with ModelStream(Checkpoint.open(zoo_folder("mixtral")), batches) as stream:
        stop = next(reference.routers(stream))
        for domain in rows:
            assert sum(len(x) for x in stop.inputs(domain.name)) == domain.tokens
            held = stop.inputs(domain.name, holdout=True)
            assert sum(len(x) for x in held) == sum(map(len, domain.holdout))


def test_a_padded_row_has_the_features_of_the_row_alone(zoo_folder):
    folder = zoo_folder("qwen2_moe")
    both = make_batches(reference.domains()[:1], batch_tokens=80)
    alone = make_batches(reference.domains()[:1], batch_tokens=1)
    assert len(both) == 1
    assert len(alone) == 3
    together, apart = stream_all(folder, both), stream_all(folder, alone)
    for path, tensors in apart.items():
        torch.testing.assert_close(together[path][0], torch.cat(tensors))


def test_the_last_layer_that_is_needed_ends_the_run(zoo_folder):
    batches, folder = reference.batches(), zoo_folder("olmoe")
    everything = stream_all(folder, batches)
    some = stream_all(folder, batches, last_layer=1)
    assert_same(some, {path: everything[path] for path in list(everything)[:2]})


@pytest.mark.parametrize("family", NOT_SERVED)
def test_routers_that_are_no_linear_map_are_refused(family, zoo_folder):
    with pytest.raises(ArchitectureError, match="single linear map"):
        ModelStream(Checkpoint.open(zoo_folder(family)), reference.batches())


def test_one_layer_at_a_time(zoo_folder):
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), reference.batches()) as stream:
        for stop in reference.routers(stream):
            real = {
                name.split(".")[2]
                for name, value in stream.model.named_parameters()
                if name.startswith("model.layers.") and value.device.type != "meta"
            }
            assert real == {str(stop.layer)}
        assert stream.model.lm_head.weight.device.type == "meta"  # never needed
    assert all(value.device.type == "meta" for value in stream.model.parameters())


def test_embeddings_and_layers_go_when_they_are_passed(zoo_folder):
    """Also those of a head that shares their matrix, unless it computes logits."""
    folder, batches = zoo_folder("olmoe", tie_word_embeddings=True), reference.batches()
    with ModelStream(Checkpoint.open(folder), batches) as stream:
        for _ in stream:
            assert stream.model.get_input_embeddings().weight.is_meta
        assert all(value.is_meta for value in stream.model.model.layers.parameters())
    whole = ModelStream(
        Checkpoint.open(folder), batches, output="logits", on_output=lambda batch, out: None
    )
    with whole as stream:
        for _ in stream:
            assert not stream.model.get_input_embeddings().weight.is_meta


def test_what_the_embeddings_gave_goes_with_the_first_layer(zoo_folder):
    given = []
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), reference.batches()) as stream:
        embeddings = stream.model.get_submodule("model.embed_tokens")
        embeddings.register_forward_hook(lambda module, args, out: given.append(out))
        next(reference.routers(stream))
    assert len(given) == len(reference.batches())
    for out in given:  # the model's own variable: its shape, one number of memory, no one's to read
        assert out.dim() == 3
        assert out.untyped_storage().nbytes() == out.element_size()
        assert bool(out.isnan().all())


def test_leaving_early_ends_every_thread_and_frees_the_inputs(zoo_folder, batch_threads):
    folder = zoo_folder("olmoe")
    with ModelStream(Checkpoint.open(folder), reference.batches()) as stream:
        stop = next(reference.routers(stream))
        watched = weakref.ref(stop.inputs("math")[0])
        assert len(batch_threads()) >= len(reference.batches())
        del stop
    del stream
    gc.collect()
    assert not batch_threads()
    assert watched() is None


def test_an_interrupt_in_the_loop_ends_every_thread(zoo_folder, batch_threads):
    def interrupted():
        with ModelStream(Checkpoint.open(zoo_folder("olmoe")), reference.batches()) as stream:
            for _ in stream:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not batch_threads()


def test_inputs_go_when_the_stream_runs_on(zoo_folder):
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), reference.batches()) as stream:
        stops = reference.routers(stream)
        first = next(stops)
        watched = weakref.ref(first.inputs("math")[0])
        next(stops)
        assert watched() is None
        assert first.inputs("math") == []


def test_failure_in_a_batch_names_layer_and_domain(zoo_folder, batch_threads):
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), reference.batches()) as stream:

        def fail(module, args):
            raise RuntimeError("a kernel broke")

        stream.model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fail)
        with pytest.raises(ArchitectureError, match=r"in layer 1, domain math.*a kernel broke"):
            list(reference.routers(stream))
    assert not batch_threads()


def _poison(name):
    return lambda tensors: tensors[name].fill_(torch.nan)


def _enlarge(prefix):
    def change(tensors):
        for name, value in tensors.items():
            if name.startswith(prefix):
                value.mul_(1e38)  # finite, but not what is made with it

    return change


def _delete(name):
    return lambda tensors: tensors.pop(name)


LAST = "model.layers.2.mlp.experts.{}.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "name", "error", "words"),
    [
        (_poison, "model.embed_tokens.weight", NumericalError, "{} holds NaN or infinity"),
        (_poison, "model.layers.1.self_attn.v_proj.weight", NumericalError, "{} holds NaN"),
        # The last layer's experts are not run where nobody asks for the output.
        (_poison, LAST.format(0), NumericalError, "{} holds NaN"),
        (_poison, LAST.format(7), NumericalError, "{} holds NaN"),
        (_enlarge, "model.layers.1.self_attn", NumericalError,
         r"in layer 1, before model\.layers\.1\.mlp\.gate, domain code, math"),
        (_enlarge, "model.layers.1.mlp.experts.0", NumericalError,
         "in the output of layer 1, domain code, math"),
        (_delete, "model.layers.1.self_attn.q_proj.weight", CheckpointError, "{}"),
        (_delete, "model.norm.weight", CheckpointError, "{}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"on_output": lambda batch, value: None}])
def test_damage_is_named(change, name, error, words, options, zoo_folder, batch_threads, tmp_path):
    checkpoint = reference.changed(zoo_folder("olmoe"), tmp_path / "damaged", change(name))
    with (
        ModelStream(checkpoint, reference.batches(), **options) as stream,
        pytest.raises(error, match=words.format(re.escape(name))),
    ):
        list(reference.routers(stream))
    assert not batch_threads()


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 2, 4), (6, 4)])
def test_only_real_tokens_must_be_finite(shape):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = Batch("math", False, torch.zeros(2, 3, dtype=torch.int64), mask, (0, 1))
    real = torch.tensor([0, 1, 3])
    value = torch.zeros(6, *shape[-1:]) if len(shape) == 2 else torch.zeros(shape).flatten(0, 1)
    value[2] = torch.nan
    assert bool(finite(value.reshape(shape), batch, real))
    assert not bool(finite(value.reshape(shape), batch, None))
    value[3] = torch.inf
    assert not bool(finite(value.reshape(shape), batch, real))


def test_unknown_token_is_refused(zoo_folder):
    batches = make_batches([Domain("math", (torch.tensor([3, 5000]),))])
    with pytest.raises(DataError, match="token 5000"):
        ModelStream(Checkpoint.open(zoo_folder("olmoe")), batches)
    with pytest.raises(DataError, match="no batch"):
        ModelStream(Checkpoint.open(zoo_folder("olmoe")), ())


def test_spilled_files_are_removed(zoo_folder, tmp_path):
    spill = tmp_path / "spill"
    spill.mkdir()
    with ModelStream(
        Checkpoint.open(zoo_folder("olmoe")),
        reference.batches(),
        StreamSettings(offload="disk", spill_smallest=0, spill_folder=spill),
    ) as stream:
        next(reference.routers(stream))
        assert list(spill.rglob("*.bin"))
    assert not list(spill.iterdir())


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "granitemoe"])
def test_reading_ahead_changes_nothing(family, zoo_folder):
    folder, batches = zoo_folder(family), reference.batches()
    with_it = stream_all(folder, batches, prefetch=True)
    assert_same(with_it, stream_all(folder, batches, prefetch=False))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["device", "cpu", "disk"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_gpu_streams_what_the_whole_model_has(family, offload, zoo_folder):
    folder = zoo_folder(family)
    batches = reference.batches()
    found = {}
    with ModelStream(
        Checkpoint.open(folder),
        batches,
        StreamSettings(torch.device("cuda"), offload=offload, spill_smallest=0),
    ) as stream:
        for stop in reference.routers(stream):
            found[stop.path] = reference.inputs_of(stop)
            assert all(x.device.type == "cuda" for x in found[stop.path])
    model = reference.whole_model(folder).to("cuda")
    expected, _ = reference.run_whole(model, tuple(found), batches)
    assert list(found) == list(expected)
    assert_same(found, expected)
