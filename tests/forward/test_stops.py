"""A stream stops before any module, hands out what it is given, and goes on with new weights."""

import pytest
import torch
from torch import Tensor

from forward import reference
from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import NumericalError, UsageError
from moemerge.forward.old_stream import ModelStream
from moemerge.forward.settings import StreamSettings

SPILLED = StreamSettings(offload="disk", spill_smallest=0)
GATHERED = StreamSettings(gather=True)


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


def module_paths(stream):
    return [hook.path for hooks in stream.input_hooks.layers for hook in hooks]


@pytest.mark.parametrize(
    "settings", [StreamSettings(), SPILLED, GATHERED], ids=["plain", "spilled", "gathered"]
)
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "deepseek_v3"])
def test_modules_get_what_the_whole_model_gives_them(family, settings, zoo_folder):
    batches = reference.batches()
    with ModelStream(Checkpoint.open(zoo_folder(family)), batches, settings) as stream:
        paths = module_paths(stream)
        stream.stop_before(paths)
        expected = heard_in_whole(reference.whole_model(zoo_folder(family)), paths, batches)
        seen = []
        for stop in stream:
            assert stop.kind == "module"
            assert f".{stop.layer}." in stop.path
            seen.append(stop.path)
            assert [arrival.batch for arrival in stop.arrivals] == list(batches)
            for arrival, given in zip(stop.arrivals, expected[stop.path], strict=True):
                assert len(arrival.given) == len(given)
                if settings.gathers:  # padding waits as zeros there, and meets other experts
                    torch.testing.assert_close(arrival.given, tuple(given), rtol=1e-5, atol=1e-5)
                else:
                    assert all(map(torch.equal, arrival.given, given)), stop.path
    assert sorted(seen) == sorted(paths)


def test_maps_that_share_their_input_say_so(zoo_folder):
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), reference.batches()) as stream:
        stream.stop_before(path for path in module_paths(stream) if ".0.self_attn." in path)
        shared = {stop.path.rpartition(".")[2]: stop.shared for stop in stream}
    assert shared == {"q_proj": False, "k_proj": True, "v_proj": True, "o_proj": False}


def test_stops_at_layers_have_the_layer_before_in_memory(zoo_folder):
    batches, folder = reference.batches(), zoo_folder("olmoe")
    hidden = []
    layers = [f"model.layers.{number}" for number in range(3)]
    entered = heard_in_whole(reference.whole_model(folder), layers, batches)
    with ModelStream(
        Checkpoint.open(folder), batches, on_output=lambda _, value: hidden.append(value)
    ) as stream:
        stream.stop_at_layers(inputs=True)
        stops = []
        for stop in stream:
            stops.append((stop.kind, stop.layer))
            real = {
                int(name.split(".")[2])
                for name, value in stream.model.named_parameters()
                if name.startswith("model.layers.") and value.device.type != "meta"
            }
            assert real == ({stop.layer - 1} if stop.layer else set())
            if stop.kind == "end":
                assert not stop.arrivals
                assert len(hidden) == len(batches)  # the outputs come before the last stop
                continue
            for arrival, given in zip(stop.arrivals, entered[stop.path], strict=True):
                assert torch.equal(arrival.given[0], given[0])
    assert stops == [("layer", 0), ("layer", 1), ("layer", 2), ("end", 3)]


def test_layers_without_inputs_bring_nothing(zoo_folder):
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), reference.batches()) as stream:
        stream.stop_at_layers()
        assert [len(stop.arrivals) for stop in stream] == [0, 0, 0, 0]


def test_replaced_weights_act_from_there_on(zoo_folder):
    batches, folder = reference.batches(), zoo_folder("olmoe")
    paths = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.gate"]
    name = f"{paths[0]}.weight"
    with ModelStream(Checkpoint.open(folder), batches) as stream:
        stream.stop_before(paths)
        stops = iter(stream)
        first = next(stops)
        new = first.inputs("math")[0].mean() + stream.model.get_parameter(name).detach() * 2
        first.replace({name: new})
        seen = [arrival.given[0].clone() for arrival in next(stops).arrivals]
    model = reference.whole_model(folder)
    with torch.no_grad():
        model.get_parameter(name).copy_(new)
    expected = heard_in_whole(model, paths, batches)[paths[1]]
    assert all(torch.equal(x, given[0]) for x, given in zip(seen, expected, strict=True))


def test_replaced_weights_are_rounded_to_what_is_stored(zoo_folder):
    folder = zoo_folder("olmoe", dtype=torch.bfloat16)
    path = "model.layers.0.self_attn.q_proj"
    with ModelStream(Checkpoint.open(folder), reference.batches()) as stream:
        stream.stop_before([path])
        stop = next(iter(stream))
        weight = stream.model.get_parameter(f"{path}.weight")
        new = weight.detach() + 1e-3 * torch.randn(weight.shape)
        stop.replace({f"{path}.weight": new})
        assert torch.equal(weight, new.bfloat16().float())
        assert not torch.equal(weight, new)
        stop.replace({f"{path}.weight": (2 * new).bfloat16()})  # as it will be stored
        assert torch.equal(weight, (2 * new).bfloat16().float())
        with pytest.raises(NumericalError, match=r"q_proj\.weight.*not finite"):
            stop.replace({f"{path}.weight": new * torch.inf})
        with pytest.raises(UsageError, match="got shape"):
            stop.replace({f"{path}.weight": new[:2]})


def test_calls_are_heard_with_and_without_what_they_give(zoo_folder):
    batches = reference.batches()
    before = []
    after = []
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), batches) as stream:
        path = "model.layers.1.self_attn.v_proj"
        stream.listen([path], lambda batch, rows, calls: before.extend(calls))
        stream.stop_at_layers()
        for stop in stream:
            if stop.layer == 2:
                weight = stream.model.get_parameter(f"{path}.weight").detach().clone()
    with ModelStream(Checkpoint.open(zoo_folder("olmoe")), batches) as stream:
        stream.listen([path], lambda batch, rows, calls: after.extend(calls), outputs=True)
        stream.stop_at_layers()
        list(stream)
    assert [call.path for call in before] == [path] * len(batches)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.args[0], other.args[0])
        assert one.out is None
        torch.testing.assert_close(other.out, other.args[0] @ weight.T)
