"""Every setting of `moemerge tune`, with the defaults that the command line and the API use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field

from moemerge.config.fields import Fraction, Name, Positive, PositiveInt, Strict
from moemerge.config.settings import (
    DEVICE,
    LIMIT,
    MAP,
    MAX_LENGTH,
    PUSH_TO_HUB,
    SEED,
    DeviceField,
    Flag,
    Seed,
    TextColumns,
)

Schedule = Literal["linear", "cosine", "constant"]
TuningDtype = Literal["auto", "float32", "bfloat16"]
AtLeastZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# What sources of the paper were tuned with, as far as it is known: docs/tune.md.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "paper": {
        "epochs": 2.0,
        "batch": 32,
        "learning_rate": 2e-5,
        "schedule": "linear",
        "warmup": 0.03,
        "weight_decay": 0.0,
        "aux_loss": 0.0,
        "max_length": 4096,
        "packing": True,
    }
}
LEARNING_RATE: Final = 2e-5
LORA_LEARNING_RATE: Final = 2e-4  # a low-rank change takes larger steps


class TuningSettings(Strict):
    """What is trained, on how much of the text, and how."""

    common = "lora only epochs batch learning_rate max_length limit device"

    preset: Literal["paper"] | None = Field(
        None, description="values for what is not given: paper, the settings of its sources"
    )
    lora: PositiveInt | None = Field(
        None, description="train a LoRA of this rank on every linear map, experts and routers"
    )
    lora_alpha: Positive | None = Field(
        None, description="scale of the LoRA (default: twice its rank)"
    )
    adapter: Flag = Field(False, description="write the adapter alone, not the model with it")
    only: Literal["routers"] | None = Field(None, description="train these parts alone: routers")
    aux_loss: AtLeastZero = Field(0.0, description="weight of the load-balancing loss")
    epochs: Positive = Field(2.0, description="passes over the rows")
    steps: PositiveInt | None = Field(None, description="steps, instead of epochs")
    batch: PositiveInt = Field(32, description="rows of a step, of all processes together")
    micro_batch: PositiveInt | None = Field(
        None, description="rows that a device computes at once (default: by their length)"
    )
    learning_rate: Positive | None = Field(
        None, description="highest learning rate (default: 2e-5, with a LoRA 2e-4)"
    )
    schedule: Schedule = Field("linear", description="how the learning rate falls")
    warmup: Fraction = Field(0.03, description="share of the steps in which it rises")
    weight_decay: AtLeastZero = Field(0.0, description="weight decay of AdamW")
    clip: Positive = Field(1.0, description="largest norm of a gradient")
    packing: Flag = Field(
        False, description="put several rows into one of max-length tokens, apart from each other"
    )
    recompute: Flag = Field(
        True, description="compute activations again in the backward pass, which saves memory"
    )
    save_every: PositiveInt | None = Field(
        None, description="steps after which the state is saved (default: a tenth)"
    )
    max_length: PositiveInt = MAX_LENGTH
    limit: PositiveInt | None = LIMIT
    seed: Seed = SEED
    map: TextColumns = MAP
    device: DeviceField = DEVICE
    dtype: TuningDtype = Field(
        "auto",
        description="dtype of products (auto: bfloat16 on a GPU for a model stored in 16 bits); "
        "weights that are trained are float32",
    )

    def resolved(self) -> Self:
        """Return the settings with the preset's values, and defaults that depend on others."""
        preset = PRESETS[self.preset] if self.preset is not None else {}
        update = {n: value for n, value in preset.items() if n not in self.model_fields_set}
        if self.learning_rate is None and "learning_rate" not in update:
            update["learning_rate"] = LEARNING_RATE if self.lora is None else LORA_LEARNING_RATE
        if self.lora is not None and self.lora_alpha is None:
            update["lora_alpha"] = 2.0 * self.lora
        return self.model_copy(update=update)


class TuningOutputSettings(Strict):
    """How the output is written; no part of what is recorded."""

    common = "overwrite"

    overwrite: Flag = Field(False, description="replace OUT if it exists")
    resume: Flag = Field(
        False, description="continue a killed run (the same command does so without it)"
    )
    push_to_hub: Name | None = PUSH_TO_HUB
