"""Describe a checkpoint from its config and tensor headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moemerge.checkpoint.quantised.tensor import QuantisedInfo
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.families.architecture import Architecture
from moemerge.families.roles import ROUTING_ROLES, Role, Unit
from moemerge.families.rules import BiasPlace, Gate, Score


@dataclass(frozen=True)
class Description:
    """The output of `inspect`. Parameters are counted as stored (a tied head once)."""

    family: str | None
    model_type: str | None
    layers: int
    moe_layers: int
    extra_layers: int  # beyond the config's number: multi-token prediction
    experts: int | None
    top_k: int | None
    gate: str | None
    layout: str
    shared_experts: bool
    parameters: int
    active_parameters: int  # used by one token: only the Top-k of the routed experts
    router_parameters: int
    bytes_by_role: Mapping[str, int]
    parameters_by_dtype: Mapping[str, int]  # by stored dtype
    stored_by_role: Mapping[str, tuple[str, ...]]  # stored formats by role
    tied: bool
    quantised: str | None
    calibratable: bool
    reason: str | None  # why it cannot be calibrated, or what to know if it can
    notice: str | None

    @property
    def dense_layers(self) -> int:
        """Return the number of layers without experts."""
        return self.layers - self.moe_layers

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(self.bytes_by_role.values())


def describe(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Description:
    """Describe a checkpoint without reading a tensor."""
    return describe_architecture(Architecture.of(config, tensors), tensors)


def describe_architecture(
    architecture: Architecture, tensors: Mapping[str, TensorInfo]
) -> Description:
    """Describe a checkpoint with a known architecture."""
    sizes = {name: _numel(header.shape) for name, header in tensors.items()}
    roles = {name: architecture.role(name) for name in tensors}
    size_by_role: Counter[str] = Counter()
    size_by_dtype: Counter[str] = Counter()
    stored_by_role: dict[str, dict[str, None]] = {}
    for name, header in tensors.items():
        stored_as, nbytes = str(header.dtype), sizes[name] * header.dtype.itemsize
        if isinstance(header, QuantisedInfo):
            stored_as, nbytes = header.stored_as, header.stored_bytes
        role = roles[name].value
        size_by_role[role] += nbytes
        size_by_dtype[stored_as] += sizes[name]
        stored_by_role.setdefault(role, {})[stored_as] = None
    layers = {n for name in tensors if (n := architecture.layer_of(name)) is not None}
    gate = _first_gate(architecture)
    experts = architecture.num_experts if architecture.is_moe else None
    routed = sum(size for name, size in sizes.items() if roles[name] is Role.EXPERT)
    total = sum(sizes.values())
    calibratable, reason = _calibratable(architecture, gate, tensors)
    return Description(
        family=architecture.family.title if architecture.family else None,
        model_type=architecture.model_type,
        layers=architecture.num_layers,
        moe_layers=len(_moe_layers(architecture, roles)),
        extra_layers=sum(n >= architecture.num_layers for n in layers),
        experts=experts,
        top_k=gate.top_k if gate else None,
        gate=describe_gate(gate) if gate else None,
        layout=_describe_layout(architecture, tensors),
        shared_experts=Role.SHARED_EXPERT in roles.values(),
        parameters=total,
        active_parameters=total - _idle(routed, gate, experts),
        router_parameters=sum(s for name, s in sizes.items() if roles[name] in ROUTING_ROLES),
        bytes_by_role=dict(size_by_role),
        parameters_by_dtype=dict(size_by_dtype),
        stored_by_role={role: tuple(kinds) for role, kinds in stored_by_role.items()},
        tied=architecture.tied,
        quantised=architecture.quantised or describe_quantised(tensors),
        calibratable=calibratable,
        reason=reason,
        notice=architecture.notice,
    )


def describe_quantised(tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return `float8_e4m3fn in 128 x 128 blocks, read as bfloat16`; None for plain floats."""
    units = [header for header in tensors.values() if isinstance(header, QuantisedInfo)]
    if not units:
        return None
    kinds = dict.fromkeys(unit.stored_as for unit in units)
    return f"{', '.join(kinds)}; read as {units[0].dtype}"


def describe_gate(gate: Gate) -> str:
    """Return `sigmoid, renormalised over the top 8 of the best 4 of 8 groups, ...`."""
    score = {
        Score.SOFTMAX: "softmax over all experts",
        Score.SIGMOID: "sigmoid",
        Score.SQRT_SOFTPLUS: "square root of softplus",
    }[gate.score]
    words = [score, f"top {gate.top_k}"]
    if gate.score is not Score.SOFTMAX:
        words[1] = (
            f"{'renormalised' if gate.normalised else 'not renormalised'} over the {words[1]}"
        )
    if gate.groups > 1:
        how = "best expert" if gate.group_score == "max" else "two best experts"
        words.append(f"from the best {gate.top_groups} of {gate.groups} groups (by their {how})")
    if gate.scale != 1.0:
        words.append(f"logits times {gate.scale:.3g}")
    if gate.soft_cap is not None:
        words.append(f"logits capped at {gate.soft_cap:g}")
    if gate.selection_bias is not None:
        where = "logits" if gate.selection_bias is BiasPlace.LOGITS else "scores"
        words.append(f"choice moved by a bias on the {where}")
    if gate.approximate:
        words.append(f"approximated ({gate.approximate})")
    return ", ".join(words)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _first_gate(architecture: Architecture) -> Gate | None:
    places = architecture.routers()
    if not places or architecture.family is None:
        return None
    place = places[-1] if places[-1].gate else places[0]
    return place.gate or architecture.family.gate.gate(
        architecture.text_config, place.layer, biased=place.selection_bias is not None
    )


def _moe_layers(architecture: Architecture, roles: Mapping[str, Role]) -> set[int]:
    layers = (architecture.layer_of(name) for name, role in roles.items() if role is Role.EXPERT)
    return {n for n in layers if n is not None and n < architecture.num_layers}


def _idle(routed: int, gate: Gate | None, experts: int | None) -> int:
    """Return the parameters of the experts that one token does not use."""
    if gate is None or not experts:
        return 0
    return routed - routed * min(gate.top_k, experts) // experts


def _describe_layout(architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> str:
    first = {  # one tensor of each kind is enough: the layers are alike
        (unit.expert is None, unit.projection, len(unit.shape)): (len(units), unit)
        for name in tensors
        if architecture.role(name) is Role.EXPERT
        for units in [architecture.units(name)]
        for unit in units[:1]
    }
    words = {_kind_of_tensor(count, unit) for count, unit in first.values()}
    if any(unit.slot.squeeze and unit.slot.transposed for _, unit in first.values()):
        words.add("transposed")
    if any(unit.slot.part and unit.slot.part.step > 1 for _, unit in first.values()):
        words.add("interleaved")
    return ", ".join(word for word in _LAYOUTS if word in words) or "dense"


_LAYOUTS = ("per expert", "fused", "flat", "one tensor for all", "transposed", "interleaved")


def _kind_of_tensor(count: int, unit: Unit) -> str:
    if count == 1:
        return "per expert" if unit.expert is not None else "one tensor for all"
    return "fused" if unit.slot.squeeze else "flat"


def _calibratable(
    architecture: Architecture, gate: Gate | None, tensors: Mapping[str, TensorInfo]
) -> tuple[bool, str | None]:
    if not architecture.is_moe:
        return False, "no experts: there is no router to calibrate"
    if architecture.family is None:
        return False, f"unknown MoE architecture {architecture.model_type!r}"
    if architecture.quantised:
        return False, f"quantised weights ({architecture.quantised}) that are not read"
    places = [p for p in architecture.routers() if p.layer < architecture.num_layers]
    if not any(place.served for place in places):
        reasons = [place.reason for place in places if place.reason]
        return False, reasons[0] if reasons else "no router was found"
    quantised = [p.weight for p in places if isinstance(tensors[p.weight], QuantisedInfo)]
    if quantised:
        return False, f"its routers are quantised themselves ({quantised[0]})"
    passed = {place.layer: place.reason for place in places if not place.served}
    if passed:
        listed = ", ".join(str(layer) for layer in passed)
        return True, f"layers passed over: {listed} ({next(iter(passed.values()))})"
    return True, f"approximately: {gate.approximate}" if gate and gate.approximate else None
