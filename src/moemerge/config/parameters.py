"""What a merge method declares about its parameters, so that a config can be checked against it.

Methods are in a higher layer. They pass their schema down (`MethodSchema`), and the config reader
checks a file against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

Scalar = float | int | bool | str

# What is known of a model from text: the second moments of every linear layer's input, the squared
# gradients of every weight, the mean size of every channel of a linear layer's input, or how much
# the loss depends on a unit.
StatisticsKind = Literal["gram", "fisher", "activation", "power", "sensitivity"]


# What a method's time is made of: passes over the weights, decompositions of every matrix, or
# hundreds of steps on it.
MethodTime = Literal["passes", "decompositions", "steps"]


class Required(Enum):
    """Marks a parameter without a default."""

    REQUIRED = "required"


REQUIRED: Final = Required.REQUIRED


class BasePolicy(Enum):
    """What `base_model` means to a method."""

    REQUIRED = "required"  # task vectors are taken against it
    OPTIONAL = "optional"  # used when given
    MEMBER = "member"  # an ordinary model like the others (linear)
    DONOR = "donor"  # lends its config and tokenizer alone; its weights are not merged


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a method, as a user writes it in YAML."""

    name: str  # the YAML key, `lambda` included
    type: type  # float, int, bool or str
    default: Scalar | Required | None
    per_model: bool  # may be given under a model; otherwise for the whole method only
    help: str
    minimum: float = -math.inf
    maximum: float = math.inf
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    choices: tuple[str, ...] = ()

    def fault(self, value: object) -> str | None:
        """Return why `value` is invalid for this parameter, or None. Numbers are as YAML reads
        them."""
        if self.type is str:
            if not isinstance(value, str) or (self.choices and value not in self.choices):
                return f"{self.name} must be one of {', '.join(self.choices)}, not {value!r}"
            return None
        if isinstance(value, bool):
            value = float(value)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"{self.name} must be a finite number, not {value!r}"
        if self.type is bool and value not in (0, 1):
            return f"{self.name} must be true or false, not {value!r}"
        if self.type is int and value != int(value):
            return f"{self.name} must be a whole number, not {value!r}"
        low = value <= self.minimum if self.exclusive_minimum else value < self.minimum
        high = value >= self.maximum if self.exclusive_maximum else value > self.maximum
        return f"{self.name} must lie in {self.interval}, not {value!r}" if low or high else None

    @property
    def interval(self) -> str:
        left = "(" if self.exclusive_minimum or self.minimum == -math.inf else "["
        right = ")" if self.exclusive_maximum or self.maximum == math.inf else "]"
        return f"{left}{self.minimum:g}, {self.maximum:g}{right}"

    def convert(self, value: Scalar) -> Scalar:
        """Return a checked value in the parameter's own type (YAML's `true` may mean 1.0)."""
        return value if self.type is str else self.type(value)


@dataclass(frozen=True)
class MethodSchema:
    """Everything that a config must know about a merge method."""

    name: str
    summary: str
    base: BasePolicy
    min_models: int  # models besides the base (MEMBER: base counted in)
    max_models: int | None
    parameters: tuple[ParameterSpec, ...]
    statistics: StatisticsKind | None = None  # of every merged model; None: needs no data
    time: MethodTime = "passes"


@dataclass(frozen=True)
class WrapperSchema(MethodSchema):
    """Everything that a config must know about a wrapper; its `statistics` are the base's."""

    turns: bool = False  # it rotates the weights before the wrapped method sees them
