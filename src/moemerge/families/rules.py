"""The types of the family table: gates, layouts of experts, config keys, and shared spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from moemerge.errors import ArchitectureError


class Score(StrEnum):
    """The score function f of p_k = f(z_k) / sum f."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"


class BiasPlace(StrEnum):
    """What a selection bias is added to before the Top-k."""

    SCORES = "scores"  # to f(z), or to the probabilities of a softmax
    LOGITS = "logits"


@dataclass(frozen=True)
class Gate:
    """One layer's gate.

    `normalised` means that p is a distribution. A sigmoid that is never renormalised is a set of
    independent Bernoulli gates and has another divergence.
    """

    score: Score
    top_k: int
    normalised: bool = True
    selection_bias: BiasPlace | None = None
    groups: int = 1  # group-limited Top-k: experts are split into `groups` ...
    top_groups: int = 1  # ... and only the best `top_groups` of them may be chosen from
    group_score: str = "max"  # "max" or "top2_sum"
    soft_cap: float | None = None  # z -> c tanh(z / c)
    approximate: str | None = None  # why this gate is only approximated
    masked_score: float = float("-inf")  # score of experts outside the kept groups (axk2: 0)
    scale: float = 1.0  # z -> s z, applied first; positive


def look_up(config: Mapping[str, Any], path: str) -> Any:
    """Return the value of `a.b` in a nested config, or None."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


@dataclass(frozen=True)
class ConfigKey:
    """A config value: its possible names, and the default if it is missing."""

    names: tuple[str, ...]
    default: Any = None

    def read(self, config: Mapping[str, Any], layer: int | None = None) -> Any:
        """Return the value; for a list with one entry per layer, that layer's."""
        for name in self.names:
            value = look_up(config, name)
            if value is not None:
                if isinstance(value, (list, tuple)):
                    return value[min(layer or 0, len(value) - 1)] if value else self.default
                return value
        return self.default

    def count(self, config: Mapping[str, Any], layer: int | None = None) -> int:
        """Return the value as a whole number; 0 if it is missing."""
        value = self.read(config, layer)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_COUNT:
            raise ArchitectureError(
                f"config.json: {self.names[0]} is {value!r:.80}, expected a whole number",
                hint=CONFIG_HINT,
            )
        return value


MAX_COUNT = 2**31  # of anything that a config counts
CONFIG_HINT = "compare it with the config.json of the model that this one was made of"


def _number(value: object, key: ConfigKey | None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        name = key.names[0] if key else "a number"
        raise ArchitectureError(
            f"config.json: {name} is {value!r:.80}, expected a number", hint=CONFIG_HINT
        )
    return float(value)


def key(*names: str, default: Any = None) -> ConfigKey:
    """Shorthand for the table."""
    return ConfigKey(names, default)


@dataclass(frozen=True)
class Groups:
    """Group-limited Top-k: config keys of its numbers, and the score of a group."""

    count: ConfigKey
    chosen: ConfigKey
    score: str
    only_if: tuple[str, str] | None = None  # (config key, value it must have)
    masked: float = float("-inf")  # score of an expert outside the chosen groups


@dataclass(frozen=True)
class GateRule:
    """How to read a `Gate` from a config."""

    score: Score | Mapping[str, Score] = Score.SOFTMAX  # a mapping is indexed by `score_key`
    score_key: ConfigKey | None = None
    top_k: ConfigKey = ConfigKey(("num_experts_per_tok",), 2)
    normalised: bool | ConfigKey = True  # for a sigmoid; a softmax is always a distribution
    bias: BiasPlace = BiasPlace.SCORES  # where the selection bias acts, if the checkpoint has one
    groups: Groups | None = None
    soft_cap: ConfigKey | None = None
    approximate: str | None = None
    scale: ConfigKey | None = None

    def gate(self, config: Mapping[str, Any], layer: int, *, biased: bool) -> Gate:
        """Return the gate of one layer; `biased` if the checkpoint has a selection bias there."""
        score = self._score(config)
        groups, chosen = self._groups(config)
        cap = self.soft_cap.read(config, layer) if self.soft_cap else None
        flag = self.normalised
        return Gate(
            score=score,
            top_k=self.top_k.count(config, layer),
            normalised=score is Score.SOFTMAX
            or bool(flag.read(config, layer) if isinstance(flag, ConfigKey) else flag),
            selection_bias=self.bias if biased else None,
            groups=groups,
            top_groups=chosen,
            group_score=self.groups.score if self.groups and groups > 1 else "max",
            soft_cap=_number(cap, self.soft_cap) if cap else None,
            approximate=self.approximate,
            masked_score=self.groups.masked if self.groups and groups > 1 else float("-inf"),
            scale=self._scale(config, layer),
        )

    def _scale(self, config: Mapping[str, Any], layer: int) -> float:
        if self.scale is None:
            return 1.0
        scale = _number(self.scale.read(config, layer), self.scale)
        if scale <= 0:  # the best expert would have the smallest logit
            raise ArchitectureError(
                f"config.json: {self.scale.names[0]} is {scale:g}, expected more than 0",
                hint=CONFIG_HINT,
            )
        return scale

    def _score(self, config: Mapping[str, Any]) -> Score:
        if isinstance(self.score, Score):
            return self.score
        named = self.score_key.read(config) if self.score_key else None
        return self.score.get(str(named), next(iter(self.score.values())))

    def _groups(self, config: Mapping[str, Any]) -> tuple[int, int]:
        rule = self.groups
        if rule is None or (rule.only_if and look_up(config, rule.only_if[0]) != rule.only_if[1]):
            return 1, 1
        count = rule.count.count(config) or 1
        chosen = rule.chosen.count(config) or count
        return (count, chosen) if count > 1 else (1, 1)


# names of one expert's gate, up and down
PROJ = ("gate_proj", "up_proj", "down_proj")
W = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Experts:
    """One set of experts in a layer. A stack holds all of them; its leading axis is the expert.

    `root` and `spelling` are the names of experts that are stored separately.
    """

    root: str = "mlp.experts"
    spelling: tuple[str, str, str] = PROJ
    transposed: bool | None = False  # stacks are (expert, in, out); None: by the hidden size
    interleaved: bool = False  # rows of gate and up alternate
    stacks: tuple[tuple[str, str], ...] = ()  # further names of stacks: (name, "gate+up" or one)
    flat: tuple[tuple[str, str, bool], ...] = ()  # (name, projection, transposed): (expert*I, d)
    whole: tuple[str, ...] = ()  # experts that are rows of a table, merged as one tensor


@dataclass(frozen=True)
class Concat:
    """A tensor that other layouts store as equal parts of its leading axis."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Router:
    """A router in a layer, with its biases and further tensors."""

    weight: str = "mlp.gate.weight"
    bias: str | None = None  # added to the logits
    selection_bias: str | None = None
    extra: tuple[str, ...] = ()  # prefixes of further tensors that feed the routing
    real_rows: bool = False  # rows beyond the number of experts are not routed experts


# Config keys of the number of experts in a layer, `a.b` being b of a nested section.
EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "ffn_config.moe_num_experts",
)
# Config keys of the number of layers, and the count per layer.
DEPTH = (("num_hidden_layers", 1), ("n_layers", 1), ("num_layers", 1), ("n_layer", 1))


@dataclass(frozen=True)
class Family:
    """One row of the table. Names are relative to the decoder layer, in the original spelling."""

    model_types: tuple[str, ...]
    title: str
    gate: GateRule
    routers: tuple[Router, ...] = (Router(),)
    experts: tuple[Experts, ...] = (Experts(),)
    shared: tuple[str, ...] = ()
    container: str = "model.layers"
    renames: tuple[tuple[str, str], ...] = ()  # from another spelling to the original one
    root_renames: tuple[tuple[str, str], ...] = ()
    concats: tuple[Concat, ...] = ()
    dense: str | None = None  # config key that makes some layers dense
    depth: tuple[tuple[str, int], ...] = DEPTH
    expert_counts: tuple[str, ...] = EXPERT_COUNTS
    served: bool = True
    reason: str | None = None  # why routers of this family are not calibrated
    passed_over: tuple[str, str] | None = None  # (tensor that marks such a layer, reason)

    @property
    def model_type(self) -> str:
        """Return the first model type, which names the family."""
        return self.model_types[0]


# --- spellings that several rows share -----------------------------------------------------------

# groups scored by the sum of their two best experts
TOP_GROUPS = Groups(key("n_group", "num_expert_group"), key("topk_group"), score="top2_sum")
# the same, but experts of other groups score 0, which may exceed one with a negative bias
TOP_GROUPS_OR_ZERO = replace(TOP_GROUPS, masked=0.0)

CORRECTED = (Router(selection_bias="mlp.gate.e_score_correction_bias"),)
SPARSE_BLOCK = (Router("block_sparse_moe.gate.weight"),)
GRANITE = (Router("block_sparse_moe.router.layer.weight"),)

MIXTRAL = (Experts("block_sparse_moe.experts", W),)
GRANITE_STACKS = (
    Experts(
        "block_sparse_moe.experts",
        stacks=(
            ("block_sparse_moe.input_linear.weight", "gate+up"),
            ("block_sparse_moe.output_linear.weight", "down"),
        ),
    ),
)

TO_SPARSE_BLOCK = ((".mlp.", ".block_sparse_moe."),)
GRANITE_ROUTER = ((".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),)

SHARED_EXPERT = ("mlp.shared_expert.", "mlp.shared_expert_gate.")
SHARED_EXPERTS = ("mlp.shared_experts.",)
