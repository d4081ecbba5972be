"""Which experts of a source are behind each expert of a model that has fewer.

A pruned model keeps some experts of its source; a model with merged experts has several of them
behind one. Targets of such a model use the source's routing restricted to its experts: the score
function over the kept experts, or the sum of the scores behind one expert.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moemerge.checkpoint.model_card import REPORT_NAME
from moemerge.checkpoint.reader import AdaptedCheckpoint
from moemerge.errors import ArchitectureError, DataError, MoeMergeError, UsageError
from moemerge.families.architecture import RouterInfo
from moemerge.families.opened import OpenModel
from moemerge.families.rules import Gate, Score, look_up
from moemerge.registry import did_you_mean
from moemerge.runtime.files import read_object
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

PRUNING = "prune"  # the part of `moemerge prune` in a report
# Config key of the number of multi-token-prediction layers, which are dropped.
EXTRA_LAYERS = "num_nextn_predict_layers"
EXPERTS = "experts"  # the key of the map in a report
# The largest log-probability of one sigmoid: several may sum up to more than 1.
LARGEST_LOG_SIGMOID = -1e-6
FORMAT = 'expected {"0": [kept experts of layer 0, in their order], "1": [...], ...}'
HINT = "name the kept experts of each layer in a file: `experts={NAME: FILE}`"


@dataclass(frozen=True)
class ExpertMap:
    """The experts of a source behind each expert of the model, for one router."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def is_selection(self) -> bool:
        """Return whether there is one source expert behind each expert."""
        return all(len(group) == 1 for group in self.groups)

    def behind(self, expert: int) -> int | None:
        """Return the one source expert behind an expert, or None if there are several."""
        group = self.groups[expert]
        return group[0] if len(group) == 1 else None

    def to_json(self) -> list[int | list[int]]:
        return [group[0] if len(group) == 1 else list(group) for group in self.groups]

    def mean(self, rows: Tensor) -> Tensor:
        """Return the mean of the source's rows (or biases) behind each expert."""
        return torch.stack([rows[list(group)].mean(dim=0) for group in self.groups])

    def combine(self, gate: Gate, logits: Tensor) -> Tensor:
        """Return logits of the model's experts, (tokens, K), from the source's.

        The scores behind one expert are summed. A sum of sigmoids may exceed 1, so normalised ones
        are divided by a constant, which does not change the distribution.
        """
        if self.is_selection:
            return logits.index_select(-1, self._places.to(logits.device)[:, 0])
        if gate.soft_cap is not None:
            raise ArchitectureError(
                "several experts of a source are behind one expert, and this family caps its "
                "logits: a sum of scores may have no logit"
            )
        from moemerge.routing.gates import is_bernoulli, log_scores

        scores = log_scores(gate, logits)
        padding = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        places = self._places.to(scores.device)
        summed = torch.cat([scores, padding], dim=-1)[..., places].logsumexp(dim=-1)
        if gate.score is Score.SIGMOID:
            shift = 0.0 if is_bernoulli(gate) else math.log(places.shape[1])
            summed = (summed - shift).clamp(max=LARGEST_LOG_SIGMOID)
            summed = summed - torch.log(-torch.expm1(summed))
        elif gate.score is Score.SQRT_SOFTPLUS:
            squared = (2 * summed).exp()
            summed = squared + torch.log(-torch.expm1(-squared))
        return summed / gate.scale

    @cached_property
    def _places(self) -> Tensor:
        """The groups as rows of equal length; -1 is the padding."""
        most = max(map(len, self.groups))
        return torch.tensor([[*group, *[-1] * (most - len(group))] for group in self.groups])


ExpertMaps = Mapping[str, Mapping[int, ExpertMap]]  # by source and layer


def maps_json(maps: ExpertMaps) -> dict[str, Any]:
    """Return the maps as plain data, by source and layer."""
    return {
        name: {str(layer): one.to_json() for layer, one in layers.items()}
        for name, layers in maps.items()
    }


def find_maps(
    model: OpenModel, sources: Sequence[OpenModel], files: Mapping[str, str | Path]
) -> dict[str, dict[int, ExpertMap]]:
    """Return the maps of every source with more experts than the model, or with a file."""
    names = [source.name for source in sources]
    for name in files:
        if name not in names:
            raise UsageError(
                f"experts of {name!r}, which is not a source{did_you_mean(name, names)}",
                hint=f"sources: {', '.join(names)}",
            )
    routers = [router for router in model.architecture.routers() if router.served]
    maps: dict[str, dict[int, ExpertMap]] = {}
    for source in sources:
        given = read_experts(Path(files[source.name])) if source.name in files else None
        by_key = {source.architecture.key(r.weight): r for r in source.architecture.routers()}
        for router in routers:
            other = by_key.get(model.architecture.key(router.weight))
            if other is None or (given is None and other.rows <= router.rows):
                continue
            layers = maps.setdefault(source.name, {})
            if router.layer in layers:
                raise ArchitectureError(
                    f"layer {router.layer} of {model.label} has several routers: its experts "
                    f"cannot be mapped to those of {source.what}"
                )
            if given is None:
                layers[router.layer] = _find_map(model, router, source, other)
            else:
                where = f"{files[source.name]}: layer {router.layer}"
                if str(router.layer) not in given:
                    raise DataError(f"{where} is missing", hint=FORMAT)
                layers[router.layer] = _checked(given[str(router.layer)], router, other, where)
    return maps


def _find_map(
    model: OpenModel, router: RouterInfo, source: OpenModel, other: RouterInfo
) -> ExpertMap:
    """Return the map of one router from the model's report, or from equal rows."""
    where = f"layer {router.layer}"
    known = reported_experts(model, source.name, router.layer, other.rows)
    if known is not None:
        return _checked(known, router, other, f"{model.label}/{REPORT_NAME}: {where}")
    return _by_rows(model, router, source, other)


def read_experts(path: Path) -> dict[str, Any]:
    """Return the content of a file of kept experts, by layer.

    It may also be a report of moemerge, or an object with the layers under `experts`.
    """
    document = read_object(path, FORMAT, DataError)
    for part in (document.get(PRUNING), document):
        if isinstance(part, Mapping) and isinstance(part.get(EXPERTS), Mapping):
            return dict(part[EXPERTS])
    return document


def reported_experts(model: OpenModel, source: str, layer: int, rows: int) -> Any:
    """Return a layer's map in the report of the model's folder, or None.

    `moemerge prune` writes it, and repairs repeat it for each of their sources.
    """
    try:
        report = read_object(model.checkpoint.path / REPORT_NAME)
    except MoeMergeError:
        return None
    parts = [part for part in report.values() if isinstance(part, Mapping)]
    maps = [part.get(EXPERTS) for part in parts]
    named = [m.get(source) for m in maps if isinstance(m, Mapping)]
    pruning = report.get(PRUNING)
    if isinstance(pruning, Mapping) and pruning.get("experts_before") == rows:
        named.append(pruning.get(EXPERTS))
    found = [m.get(str(layer)) for m in named if isinstance(m, Mapping)]
    return next((one for one in found if one is not None), None)


def _checked(given: object, router: RouterInfo, other: RouterInfo, where: str) -> ExpertMap:
    """Return a map from plain data; refuse wrong counts, unknown and repeated experts."""
    entries = given if isinstance(given, Sequence) and not isinstance(given, str) else None
    if entries is None or len(entries) != router.rows:
        count = "no list" if entries is None else f"{len(entries)} experts"
        raise DataError(f"{where}: {count}, but the model has {router.rows}", hint=FORMAT)
    groups = [tuple(e) if isinstance(e, Sequence) else (e,) for e in entries]
    seen: set[int] = set()
    for expert in (expert for group in groups for expert in group):
        if isinstance(expert, bool) or not isinstance(expert, int) or not 0 <= expert < other.rows:
            raise DataError(
                f"{where}: {expert!r:.40} is not an expert of the source, which has {other.rows}",
                hint=FORMAT,
            )
        if expert in seen:
            raise DataError(f"{where}: expert {expert} of the source appears twice", hint=FORMAT)
        seen.add(expert)
    if not all(groups):
        raise DataError(f"{where}: an expert has no expert of the source behind it", hint=FORMAT)
    return ExpertMap(tuple(groups))


def _by_rows(
    model: OpenModel, router: RouterInfo, source: OpenModel, other: RouterInfo
) -> ExpertMap:
    """Return the map whose router rows (weight and biases) are equal, in the model's dtype."""
    equal = torch.ones(router.rows, other.rows, dtype=torch.bool)
    for here, there in (
        (router.weight, other.weight),
        (router.bias, other.bias),
        (router.selection_bias, other.selection_bias),
    ):
        if here is None or there is None:
            continue
        mine = model.checkpoint.read(here)
        theirs = source.checkpoint.read(there).to(mine.dtype)
        mine, theirs = mine.reshape(-1, _width(mine)), theirs.reshape(-1, _width(theirs))
        for row in range(router.rows):
            equal[row] &= (mine[row] == theirs[: other.rows]).all(dim=1)
    where = f"layer {router.layer}: {router.weight} of {model.label}"
    counts = equal.sum(dim=1)
    for row, count in enumerate(counts.tolist()):
        if count != 1:
            what = "no row" if count == 0 else f"{count} rows"
            raise ArchitectureError(
                f"{where}: row {row} equals {what} of {source.what}, so the kept experts are not "
                "known" + (" (was the router changed after pruning?)" if count == 0 else ""),
                hint=HINT,
            )
    kept = equal.int().argmax(dim=1).tolist()
    twice = next((expert for expert in kept if kept.count(expert) > 1), None)
    if twice is not None:
        raise ArchitectureError(f"{where}: two rows equal row {twice} of {source.what}", hint=HINT)
    return ExpertMap(tuple((expert,) for expert in kept))


def _width(tensor: Tensor) -> int:
    return tensor.shape[-1] if tensor.dim() > 1 and tensor.shape[0] > 1 else 1


# --- configs ------------------------------------------------------------------------------------


def config_with_experts(model: OpenModel, count: int) -> dict[str, Any]:
    """Return config.json with another number of experts, without layers that are never run."""
    if isinstance(model.checkpoint, AdaptedCheckpoint):
        config = copy.deepcopy(dict(model.checkpoint.config))
    else:
        config = read_object(model.checkpoint.path / "config.json")
    architecture = model.architecture
    text = config
    for part in architecture.layer_key.section:
        text = text[part]
    family, before = architecture.family, architecture.num_experts
    assert family is not None
    for path in family.expert_counts:
        *sections, key = path.split(".")
        owner = look_up(text, ".".join(sections)) if sections else text
        if not isinstance(owner, dict) or key not in owner:
            continue
        value = owner[key]
        if isinstance(value, list):
            owner[key] = [count if v == before else v for v in value]
        elif value == before:
            owner[key] = count
    if text.get(EXTRA_LAYERS):
        text[EXTRA_LAYERS] = 0
    return config
