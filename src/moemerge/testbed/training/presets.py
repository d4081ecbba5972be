"""Sizes of models, how long they train, and the two regimes of specialisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moemerge.testbed.network.layout import Shape


@dataclass(frozen=True)
class Preset:
    """A model's size and its training schedule."""

    name: str
    hidden: int
    width: int  # of an expert
    experts: int
    top_k: int
    layers: int
    heads: int
    base_steps: int
    specialist_steps: int
    batch: int = 128  # sequences a step
    base_lr: float = 2e-3
    specialist_lr: float = 1e-3
    dtype: torch.dtype = torch.float32  # of the checkpoints

    def shape(self, arch: str) -> Shape:
        """The model in this size; Qwen3-MoE with half as many heads for keys, as is usual."""
        olmoe = arch == "olmoe"
        return Shape(
            arch=arch,
            hidden=self.hidden,
            width=self.width,
            experts=self.experts,
            top_k=self.top_k,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads if olmoe else self.heads // 2,
            eps=1e-5 if olmoe else 1e-6,
            theta=10_000.0,
            normalised=not olmoe,
        )


@dataclass(frozen=True)
class Regime:
    """How specialists are made of the base: factors on the preset's rates and the balancing loss.

    `soft` moves weights little and routers much, which is where merging breaks routing; `plain` is
    ordinary fine-tuning.
    """

    weights: float  # on the learning rate of everything
    routers: float  # on the routers' rate, on top of that
    balance: float  # on the load-balancing loss


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("tiny", 64, 24, 16, 2, 3, 4, base_steps=2500, specialist_steps=500, batch=64),
        Preset("small", 128, 48, 32, 4, 6, 4, base_steps=5000, specialist_steps=600),
        Preset(
            "demo", 96, 32, 24, 3, 5, 4,
            base_steps=5000, specialist_steps=600, dtype=torch.bfloat16,
        ),
    )
}  # fmt: skip
REGIMES: dict[str, Regime] = {
    "soft": Regime(weights=0.35, routers=15.0, balance=5.0),
    "plain": Regime(weights=1.0, routers=1.0, balance=1.0),
}
BALANCE = 0.02  # weight of the load-balancing loss in pretraining
HARD_SHARE = 0.15  # of pretraining's sequences
PROMPT_SHARE = 0.5  # of pretraining's steps that also learn the prompts; later ones, answers only
WARMUP = 100  # steps to the full learning rate
FINAL_LR = 0.05  # of the full rate, reached linearly at the last step
CLIP = 1.0  # largest norm of a model's gradient
