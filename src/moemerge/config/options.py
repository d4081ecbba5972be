"""How a job is run, as opposed to what it makes: the one place of these defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MergeOptions:
    """Options of `moemerge merge`; the command line and the Python API share them."""

    device: str = "auto"
    out_shard_size: str = "5GB"
    seed: int = 0
    overwrite: bool = False
    lenient: bool = False
    allow_nonfinite: bool = False
