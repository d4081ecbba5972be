"""A stream stops before any module, hands out what it is given, and goes on with new weights."""

import pytest
import torch
from torch import Tensor

from forward import reference
from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import NumericalError, UsageError
from moemerge.forward.settings import StreamSettings
from moemerge.forward.stream import ModelStream

SPILLED = StreamSettings(offload="disk", spill_smallest=0)


def heard_in_whole(model, paths, batches):
    """By module and batch: the tensors that the whole model gives it, rows of real tokens."""
    found = {path: [] for path in paths}

    def listener(path):
        def listen(module, args, kwargs):
            given = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
            found[path].append([v.reshape(-1, v.shape[-1]).clone() for v in given])

        return listen

    hooks = [
        model.get_submodule(p).register_forward_pre_hook(listener(p), with_kwargs=True)
        for p in paths
    ]
    with torch.no_grad():
        for batch in batches:
            mask = batch.mask.long() if batch.padded else None
            model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False)
    for hook in hooks:
        hook.remove()
    for calls in found.values():
        for batch, given in zip(batches, calls, strict=True):
            rows = batch.mask.reshape(-1)
            given[:] = [v[rows] for v in given if len(v) == len(rows)]
    return found


def stops(stream, paths):
    """Every stop before one of these modules."""
    for _ in stream:
        while (stop := stream.run_to(paths)) is not None:
            yield stop


def module_paths(stream):
    return [hook.path for hooks in stream.input_hooks.layers for hook in hooks]


@pytest.mark.parametrize("settings", [StreamSettings(), SPILLED], ids=["plain", "spilled"])
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "deepseek_v3"])
def test_modules_get_what_the_whole_model_gives_them(family, settings, zoo_folder):
    batches = reference.batches()
    with ModelStream(Checkpoint.open(zoo_folder(family)), batches, settings) as stream:
        paths = module_paths(stream)
        expected = heard_in_whole(reference.whole_model(zoo_folder(family)), paths, batches)
        seen = []
        for stop in stops(stream, paths):
            assert f".{stop.layer}." in stop.path
            seen.append(stop.path)
            assert [arrival.batch for arrival in stop.arrivals] == list(batches)
            for arrival, given in zip(stop.arrivals, expected[stop.path], strict=True):
                assert len(arrival.given) == len(given)
                assert all(map(torch.equal, arrival.given, given)), stop.path
    assert sorted(seen) == sorted(paths)


def test_maps_that_share_their_input_say_so(zoo_folder):
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), reference.batches()) as stream:
        paths = [path for path in module_paths(stream) if ".0.self_attn." in path]
        shared = {stop.path.rpartition(".")[2]: stop.same_input for stop in stops(stream, paths)}
    assert shared == {"q_proj": False, "k_proj": True, "v_proj": True, "o_proj": False}


def test_only_the_layer_that_runs_is_in_memory(zoo_folder):
    batches, folder = reference.batches(), zoo_folder("olmoe")
    hidden = []
    layers = [f"model.layers.{number}" for number in range(3)]
    entered = heard_in_whole(reference.whole_model(folder), layers, batches)
    with ModelStream(
        Checkpoint.open(folder),
        batches,
        on_output=lambda _, value: hidden.append(value),
        layer_inputs=True,
    ) as stream:
        for number in stream:
            for arrival, given in zip(stream.entered, entered[layers[number]], strict=True):
                assert torch.equal(arrival.given[0], given[0])
            stream.finish_layer()
            assert stream.run_to(["model.layers.0.mlp.gate"]) is None  # which was passed
            real = {
                int(name.split(".")[2])
                for name, value in stream.model.named_parameters()
                if name.startswith("model.layers.") and value.device.type != "meta"
            }
            assert real == {number}
    assert number == 2
    assert len(hidden) == len(batches)


def test_replaced_weights_act_from_there_on(zoo_folder):
    batches, folder = reference.batches(), zoo_folder("olmoe")
    paths = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.gate"]
    name = f"{paths[0]}.weight"
    with ModelStream(Checkpoint.open(folder), batches) as stream:
        reached = stops(stream, paths)
        new = next(reached).inputs("math")[0].mean() + stream.parameter(name) * 2
        stream.put({name: new})
        seen = reference.inputs_of(next(reached))
    model = reference.whole_model(folder)
    with torch.no_grad():
        model.get_parameter(name).copy_(new)
    expected = heard_in_whole(model, paths, batches)[paths[1]]
    assert all(torch.equal(x, given[0]) for x, given in zip(seen, expected, strict=True))


def test_replaced_weights_are_rounded_to_what_is_stored(zoo_folder):
    folder = zoo_folder("olmoe", dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj.weight"
    with ModelStream(Checkpoint.open(folder), reference.batches()) as stream:
        stream.begin_layer()
        weight = stream.parameter(name)
        new = weight + 1e-3 * torch.randn(weight.shape)
        stream.put({name: new})
        assert torch.equal(weight, new.bfloat16().float())
        assert not torch.equal(weight, new)
        stream.put({name: (2 * new).bfloat16()})  # as it will be stored
        assert torch.equal(weight, (2 * new).bfloat16().float())
        with pytest.raises(NumericalError, match=r"q_proj\.weight.*not finite"):
            stream.put({name: new * torch.inf})
        with pytest.raises(UsageError, match="got shape"):
            stream.put({name: new[:2]})


def test_calls_are_heard_with_and_without_their_outputs(zoo_folder):
    batches, before, after = reference.batches(), [], []
    path = "model.layers.1.self_attn.v_proj"
    for heard, outputs in ((before, False), (after, True)):
        with ModelStream(Checkpoint.open(zoo_folder("olmoe")), batches) as stream:
            stream.listen(
                [path], lambda _, rows, calls, to=heard: to.extend(calls), outputs=outputs
            )
            for number in stream:
                if number == 1:
                    weight = stream.parameter(f"{path}.weight").clone()
    assert [call.path for call in before] == [path] * len(batches)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.args[0], other.args[0])
        assert one.out is None
        torch.testing.assert_close(other.out, other.args[0] @ weight.T)
