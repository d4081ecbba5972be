"""The one table of MoE families: what each names its tensors, how its experts lie, how it routes.

Names are relative to the decoder layer, in the spelling of the family's original checkpoints.
`renames` lead there from other spellings (above all the one transformers 5 has in memory and writes
with `save_original_format=False`); they are plain replacements on `.name.`, tried in order.
"""

from __future__ import annotations

from moemerge.architectures.families_other import OTHER_FAMILIES
from moemerge.architectures.families_sigmoid import SIGMOID_FAMILIES
from moemerge.architectures.families_softmax import SOFTMAX_FAMILIES
from moemerge.architectures.rules import Family
from moemerge.errors import UsageError

FAMILIES: tuple[Family, ...] = (*SOFTMAX_FAMILIES, *SIGMOID_FAMILIES, *OTHER_FAMILIES)

BY_MODEL_TYPE: dict[str, Family] = {name: row for row in FAMILIES for name in row.model_types}
_BY_CLASS: dict[str, Family] = {name.replace("_", ""): row for name, row in BY_MODEL_TYPE.items()}


def families() -> tuple[Family, ...]:
    """Every row of the table, and those that plugins added."""
    return tuple({row.model_type: row for row in BY_MODEL_TYPE.values()}.values())


def add_family(family: Family) -> None:
    """A row of the caller's own, for models that the table does not know."""
    for name in family.model_types:
        if name in BY_MODEL_TYPE:
            raise UsageError(
                f"the model_type {name!r} is in the table of families already",
                hint="an existing family cannot be replaced",
            )
    for name in family.model_types:
        BY_MODEL_TYPE[name] = _BY_CLASS[name.replace("_", "")] = family


def family_of(model_type: str | None) -> Family | None:
    """The row of a `model_type`, None for one the table does not know."""
    return BY_MODEL_TYPE.get(model_type or "")


def family_of_class(name: str) -> Family | None:
    """The row of a class name: `OlmoeForCausalLM` is olmoe."""
    return _BY_CLASS.get(name.split("For")[0].removesuffix("Model").lower())
