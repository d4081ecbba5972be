"""A share of `python -m tools.power_loss`, and what its model of a file system finds."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from tools import power_loss
from tools.fuzz import corpus
from tools.power_loss import Change, Name, Sync, Write

PARTIAL, FILE = 1, 2
MADE: list[Change] = [
    Name(0, ".partial", PARTIAL),
    Name(PARTIAL, "x", FILE),
    Write(FILE, 0, b"all"),
]
RENAMED: list[Change] = [Name(0, "out", PARTIAL, (0, ".partial")), Sync(0)]


def found(changes: list[Change]) -> set[bytes | None]:
    """Return every content of out/x after a power loss; None if OUT exists without the file."""
    contents: set[bytes | None] = set()
    for seed in range(200):
        disk = power_loss.after_power_loss(changes, {0, PARTIAL}, random.Random(seed))
        tree = dict(disk.tree())
        if "out" in tree:
            contents.add(tree.get("out/x"))
    return contents


def test_the_model_finds_missing_syncs() -> None:
    assert found([*MADE, Sync(FILE), Sync(PARTIAL), *RENAMED]) == {b"all"}
    assert None in found([*MADE, Sync(FILE), *RENAMED])  # the folder's names were not synced
    assert found([*MADE, Sync(PARTIAL), *RENAMED]) > {b"all"}  # nor the file


@pytest.mark.skipif(shutil.which("strace") is None, reason="the calls are recorded by strace")
def test_a_merge_survives_a_power_loss(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    corpus.write_files(tmp_path / "corpus")
    campaign = power_loss.Campaign("merge", tmp_path / "corpus", Path(os.path.realpath(tmp_path)))
    whole = {path.removeprefix("out/"): data for path, data in campaign.whole.items() if data}
    assert whole == {path: data for path, data in campaign.found.items() if data}
    rng = random.Random(1)
    for _ in range(500):
        campaign.check(rng, again=False)
    assert not campaign.bad
    assert set(campaign.outcomes) == {"no OUT", "OUT complete"}
