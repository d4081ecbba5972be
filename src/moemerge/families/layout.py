"""The layout of experts in stored tensors: separate, stacked, or in one flat matrix."""

from __future__ import annotations

from dataclasses import dataclass, field

from moemerge.families.names import split_expert
from moemerge.families.roles import AxisPart, Role, Slot, Unit
from moemerge.families.rules import Experts, Family

_PROJECTIONS = ("gate", "up", "down")
# Names of one expert's projections, for experts stored separately.
_KNOWN = {
    "gate_proj": "gate",
    "linear_gate": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
_DEFAULT_STACKS = (
    ("gate_up_proj", "gate+up"),
    ("gate_proj", "gate"),
    ("up_proj", "up"),
    ("down_proj", "down"),
)


def projection_of(unit: Unit) -> str | None:
    """Return gate, up or down for a projection of an expert or another MLP, else None."""
    if unit.projection is not None or unit.role not in (Role.MLP, Role.SHARED_EXPERT):
        return unit.projection
    return _KNOWN.get(unit.key.split(".")[-2]) if unit.key.count(".") else None


@dataclass(frozen=True)
class Piece:
    """One unit of a stored tensor, with its name relative to the layer."""

    rest: str
    slot: Slot
    shape: tuple[int, ...]
    expert: int | None = None
    projection: str | None = None


@dataclass(frozen=True)
class _Stack:
    experts: Experts
    parts: tuple[str, ...]  # projections that share the tensor
    leaf: str  # weight or bias
    interleaved: bool
    flat: bool = False
    transposed: bool | None = False


@dataclass(frozen=True)
class ExpertLayout:
    """The names of all stacks of one family."""

    stacks: dict[str, _Stack] = field(default_factory=dict)
    tables: frozenset[str] = frozenset()  # rows are experts, merged as one tensor
    roots: dict[str, Experts] = field(default_factory=dict)
    hidden_size: int | None = None
    num_experts: int | None = None

    @classmethod
    def of(
        cls, family: Family | None, hidden_size: int | None, num_experts: int | None
    ) -> ExpertLayout:
        """Return the layout of a family; without a family, nothing is a stack."""
        if family is None:
            return cls()
        stacks: dict[str, _Stack] = {}
        for experts in family.experts:
            stacks.update(_stacks_of(experts))
        return cls(
            stacks,
            frozenset("." + name for experts in family.experts for name in experts.whole),
            {"." + experts.root: experts for experts in family.experts},
            hidden_size,
            num_experts,
        )

    def is_stack(self, rest: str) -> bool:
        """Return whether a name (relative to the layer, leading dot) is a stack of experts."""
        return rest in self.stacks

    def split_expert(self, rest: str) -> tuple[str, int, str] | None:
        """Split one expert's name to (`.mlp.experts`, 3, `.up_proj.weight`); None for others."""
        one = split_expert(rest)
        if one is None:
            for root in self.roots:  # a family's name may not be `experts`
                number, _, tail = rest.removeprefix(root + ".").partition(".")
                if rest.startswith(root + ".") and number.isdecimal() and tail:
                    return root, int(number), "." + tail
        return one

    def one_expert(self, rest: str, expert: int) -> tuple[str, str | None]:
        """Return the original spelling and the projection of one expert's tensor.

        `rest` is the name without the expert's number.
        """
        named = (root for root in self.roots if rest.startswith(root + "."))
        root = next(named, None) or rest.partition("experts.")[0] + "experts"
        tail = rest.removeprefix(root + ".")
        module, _, leaf = tail.partition(".")
        experts = self.roots.get(root)
        projection = _KNOWN.get(module)
        if experts is not None:
            spelled = dict(zip(experts.spelling, _PROJECTIONS, strict=True))
            projection = spelled.get(module, projection)
            if projection is not None:
                module = experts.spelling[_PROJECTIONS.index(projection)]
        return f"{root}.{expert}.{module}{'.' + leaf if leaf else ''}", projection

    def pieces(self, rest: str, shape: tuple[int, ...]) -> tuple[Piece, ...] | None:
        """Return the units of a stack, expert by expert; None for other tensors."""
        stack = self.stacks.get(rest)
        if stack is None or not shape:
            return None
        if stack.flat:
            return self._flat_pieces(stack, shape)
        matrix = len(shape) == 3
        if len(shape) != (3 if stack.leaf == "weight" else 2):
            return None
        transposed = matrix and self._is_transposed(stack, shape)
        axis = 1 if transposed else 0
        return tuple(
            _piece(stack, expert, index, shape[1:], axis, transposed)
            for expert in range(shape[0])
            for index in range(len(stack.parts))
        )

    def _is_transposed(self, stack: _Stack, shape: tuple[int, ...]) -> bool:
        if stack.transposed is not None:
            return stack.transposed
        into_hidden = stack.parts == ("down",)
        out = shape[1] if into_hidden else shape[2]
        # in (expert, out, in), the hidden size is `in` of gate and up, `out` of down
        return out != self.hidden_size

    def _flat_pieces(self, stack: _Stack, shape: tuple[int, ...]) -> tuple[Piece, ...] | None:
        count = self.num_experts
        if not count or shape[0] % count:
            return None
        each = shape[0] // count
        size = (shape[1], each) if stack.transposed else (each, shape[1])
        return tuple(
            Piece(
                _rest(stack, expert, 0),
                Slot(rows=(expert * each, (expert + 1) * each), transposed=bool(stack.transposed)),
                size,
                expert,
                stack.parts[0],
            )
            for expert in range(count)
        )


def _stacks_of(experts: Experts) -> dict[str, _Stack]:
    named = [(f"{experts.root}.{name}", what) for name, what in _DEFAULT_STACKS]
    named += [(f"{experts.root}.w13_weight", "gate+up"), (f"{experts.root}.w2_weight", "down")]
    stacks: dict[str, _Stack] = {}
    for name, what in (*named, *experts.stacks):
        parts = tuple(what.split("+"))
        interleaved = len(parts) > 1 and (experts.interleaved or name.endswith("w13_weight"))
        weight = _Stack(experts, parts, "weight", interleaved, transposed=experts.transposed)
        stacks["." + name] = weight
        bias = _Stack(experts, parts, "bias", interleaved)
        stacks["." + name.removesuffix(".weight") + "_bias"] = bias
    for name, what, transposed in experts.flat:
        stacks["." + name] = _Stack(
            experts, (what,), "weight", False, flat=True, transposed=transposed
        )
    return stacks


def _rest(stack: _Stack, expert: int, index: int) -> str:
    spelling = stack.experts.spelling[_PROJECTIONS.index(stack.parts[index])]
    return f".{stack.experts.root}.{expert}.{spelling}.{stack.leaf}"


def _piece(
    stack: _Stack, expert: int, index: int, each: tuple[int, ...], axis: int, transposed: bool
) -> Piece:
    count = len(stack.parts)
    part = None
    size = list(each)
    if count > 1:
        length = each[axis]
        size[axis] = length // count
        if stack.interleaved:
            part = AxisPart(axis, index, length, count)
        else:
            part = AxisPart(axis, index * size[axis], (index + 1) * size[axis])
    slot = Slot((expert, expert + 1), squeeze=True, part=part, transposed=transposed)
    shape = tuple(reversed(size)) if transposed else tuple(size)
    return Piece(_rest(stack, expert, index), slot, shape, expert, stack.parts[index])


def equal_parts(
    family: Family | None, rest: str, shape: tuple[int, ...]
) -> tuple[Piece, ...] | None:
    """Return the parts of a tensor that other layouts store separately; None for others."""
    for concat in family.concats if family is not None else ():
        if rest == "." + concat.name and shape and shape[0] % len(concat.parts) == 0:
            each = shape[0] // len(concat.parts)
            return tuple(
                Piece("." + part, Slot(rows=(i * each, (i + 1) * each)), (each, *shape[1:]))
                for i, part in enumerate(concat.parts)
            )
    return None
