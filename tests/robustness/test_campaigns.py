"""Small shares of the robustness campaigns of tools/."""

import os
import random
import shutil
from pathlib import Path

import pytest

from processes import environment, interpreter, python
from together import LIMIT
from tools import fuzz_parsers, power_loss
from tools.fuzz import corpus
from tools.power_loss import Name, Sync, Write

PARTIAL, FILE = 1, 2
MADE = [
    Name(0, ".partial", PARTIAL),
    Name(PARTIAL, "x", FILE),
    Write(FILE, 0, b"all"),
]
RENAMED = [Name(0, "out", PARTIAL, (0, ".partial")), Sync(0)]


def found(changes):
    """Return every content of out/x after a power loss; None if OUT exists without the file."""
    contents = set()
    for seed in range(200):
        disk = power_loss.after_power_loss(changes, {0, PARTIAL}, random.Random(seed))
        tree = dict(disk.tree())
        if "out" in tree:
            contents.add(tree.get("out/x"))
    return contents


def test_the_model_finds_missing_syncs():
    assert found([*MADE, Sync(FILE), Sync(PARTIAL), *RENAMED]) == {b"all"}
    assert None in found([*MADE, Sync(FILE), *RENAMED])  # the folder's names were not synced
    assert found([*MADE, Sync(PARTIAL), *RENAMED]) > {b"all"}  # nor the file


@pytest.mark.skipif(shutil.which("strace") is None, reason="the calls are recorded by strace")
def test_a_merge_survives_a_power_loss(tmp_path):
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


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "chosen",
    [("--count", "12"), pytest.param(("--count", "38", "--controls"), marks=pytest.mark.slow)],
    ids=["some", "every kind, and valid files"],
)
def test_hostile_files_are_refused_and_valid_ones_are_not(chosen, tmp_path, monkeypatch):
    """In a separate process: this one has threads and must not fork."""
    monkeypatch.chdir(ROOT)
    done = python(
        "from tools.fuzz.run import main; raise SystemExit(main())",
        *(*chosen, "--seed", "7", "--seconds", "90"),
        env=environment(TMPDIR=str(tmp_path)),
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_parsers_accept_or_refuse(tmp_path, capsys):
    chosen = fuzz_parsers.targets(tmp_path)
    assert fuzz_parsers.campaign(chosen, 4000, seed=7, seconds=60) == 0, capsys.readouterr().out
    for name in ("rows", "safetensors header", "config.json", "adapter config"):
        assert {"refused", "accepted"} <= set(chosen[name].outcomes), name


def test_a_crash_is_found(tmp_path, capsys):
    def parse(data):
        data.decode("ascii")

    broken = fuzz_parsers.Target(parse, [b'{"text": "one"}'], 1)
    assert fuzz_parsers.campaign({"broken": broken}, 500, seed=1, seconds=60) == 1
    assert "UnicodeDecodeError" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_a_killed_rank_ends_the_others_and_any_number_resumes(tmp_path):
    done = interpreter(
        *("-m", "tools.faults.ranks", "--kills", "1", "--verb", "refit"),
        cwd=ROOT,
        timeout=LIMIT,
        env=environment(TMPDIR=str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| refit |" in done.stdout
