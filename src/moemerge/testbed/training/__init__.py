"""Training of small OLMoE and Qwen3-MoE models: a base and its specialists."""

from moemerge.testbed.network.layout import ARCHITECTURES
from moemerge.testbed.training.data import PRESETS, REGIMES, Preset
from moemerge.testbed.training.finetuning import FineTuned, finetune, finetune_many
from moemerge.testbed.training.run import check_steps_scale, train, train_many
from moemerge.testbed.training.sets import TrainedSet, bundled_set, open_set
from moemerge.testbed.training.stacks import Job

__all__ = [
    "ARCHITECTURES",
    "PRESETS",
    "REGIMES",
    "FineTuned",
    "Job",
    "Preset",
    "TrainedSet",
    "bundled_set",
    "check_steps_scale",
    "finetune",
    "finetune_many",
    "open_set",
    "train",
    "train_many",
]
