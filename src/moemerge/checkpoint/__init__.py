"""Model folders: lazy reading, crash-safe writing, adapters, companion files."""

from moemerge.checkpoint.locate import hub_ids, locate
from moemerge.checkpoint.output import check_output, require_space
from moemerge.checkpoint.patch import CheckpointPatch
from moemerge.checkpoint.reader import AdaptedCheckpoint, Checkpoint
from moemerge.checkpoint.tensors import TensorInfo, format_size, main_dtype, parse_size
from moemerge.checkpoint.writer import CheckpointWriter

__all__ = [
    "AdaptedCheckpoint",
    "Checkpoint",
    "CheckpointPatch",
    "CheckpointWriter",
    "TensorInfo",
    "check_output",
    "format_size",
    "hub_ids",
    "locate",
    "main_dtype",
    "parse_size",
    "require_space",
]
