"""The same stream on an accelerator: pinned reads, spilling to the host, the whole model's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from features import reference
from moemerge.checkpoint.reader import Checkpoint
from moemerge.features.router_stream import RouterStream
from moemerge.features.settings import StreamSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("offload", ["device", "cpu", "disk"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_features_are_those_of_the_whole_model(
    family: str, offload: Any, zoo_folder: Callable[..., Path]
) -> None:
    folder = zoo_folder(family)
    batches = reference.batches()
    found: reference.Features = {}
    with RouterStream(
        Checkpoint.open(folder),
        batches,
        StreamSettings(torch.device("cuda"), offload=offload, spill_smallest=0),
    ) as stream:
        for stop in stream:
            pairs = reference.in_order(stop, batches)
            assert all(x.device.type == "cuda" for _, x in pairs)
            found[stop.path] = [x.clone() for _, x in pairs]
    model = reference.whole_model(folder).to("cuda")
    expected, _ = reference.run_whole(model, tuple(found), batches)
    assert list(found) == list(expected)
    for path, tensors in expected.items():
        if offload == "device":
            # Padding waits as zeros there: it meets other experts, whose products are cut anew.
            torch.testing.assert_close(found[path], tensors, rtol=1e-5, atol=1e-5)
        else:
            assert all(map(torch.equal, found[path], tensors)), path
