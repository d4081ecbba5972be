"""Models beside each other stop at the same routers, or say that they cannot."""

import pytest
import torch

import zoo
from forward import reference
from moemerge.errors import ArchitectureError
from moemerge.families.opened import open_model
from moemerge.forward import settings as memory
from moemerge.forward.router_stream import RouterStream
from moemerge.forward.settings import StreamSettings
from moemerge.repairs.lockstep.streams import Lockstep, Need, Side, open_lockstep
from moemerge.runtime.progress import Silent


def opened(name, folder, batches, **options):
    model = open_model(name, folder)
    return model, RouterStream(model.checkpoint, batches, **options)


def test_each_stop_is_of_one_router(zoo_folder, tmp_path):
    folder = zoo_folder("olmoe")
    other = zoo.perturb(folder, tmp_path / "other", seed=3, scale=0.3)
    batches = reference.batches()
    code = tuple(batch for batch in batches if batch.domain == "code")
    with Lockstep(
        opened("merged", folder, batches), {"code": opened("code", other, code)}
    ) as models:
        seen = []
        for stops in models:
            stop, others = stops.lead, stops.others
            seen.append(stop.layer)
            assert others["code"].path == stop.path
            assert stop.domains == ("math", "code")
            assert others["code"].domains == ("code",)
            for (mine, x), (theirs, y) in zip(
                stop.by_batch("code"), others["code"].by_batch("code"), strict=True
            ):
                assert mine is theirs
                assert x.shape == y.shape
                assert not torch.equal(x, y)
        assert seen == [0, 1, 2]
        assert models.memory == [stream.memory for stream in models.streams]


@pytest.mark.parametrize("mine", [(0, 1), (0, 1, 2)])
def test_models_that_stop_elsewhere_are_refused(mine, zoo_folder):
    folder, batches = zoo_folder("olmoe"), reference.batches()
    theirs = (0, 1, 2) if mine == (0, 1) else (0, 2)
    lead = opened("merged", folder, batches, layers=mine)
    others = {"code": opened("code", folder, batches, layers=theirs)}
    with Lockstep(lead, others) as models, pytest.raises(ArchitectureError, match="same structure"):
        for _ in models:
            pass


def test_a_second_layer_is_read_ahead_only_if_it_fits(zoo_folder, monkeypatch):
    def estimate():
        with open_lockstep(
            {"merged": Side(open_model("merged", zoo_folder("olmoe")))},
            reference.batches(),
            StreamSettings(offload="device", prefetch=True),
            layers=(0, 1, 2),
            need=Need("this", 0, []),
            progress=Silent(),
        ) as models:
            assert [stops.lead.layer for stops in models] == [0, 1, 2]
            return models.memory[0]

    roomy = estimate()
    assert roomy.ahead == roomy.layer > 0
    free = (roomy.on_device - roomy.layer // 2) / memory.HEADROOM
    monkeypatch.setattr(memory, "available_memory", lambda _: free)
    assert estimate().ahead == 0
