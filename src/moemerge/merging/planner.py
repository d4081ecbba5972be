"""Turn a checked config into a plan: inputs, method and parameters of every output tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from moemerge.checkpoint import TensorInfo
from moemerge.checkpoint.quantised.tensor import QuantisedInfo
from moemerge.config.load import LoadedConfig
from moemerge.config.parameter_values import ParameterReader, TensorContext
from moemerge.config.resolve import MergeSlice, NormalisedMerge, SliceModel
from moemerge.errors import ArchitectureError, CheckpointError
from moemerge.families.names import with_layer
from moemerge.families.opened import OpenModel, open_model
from moemerge.families.roles import ROUTING_ROLES, WHOLE, Role, Unit
from moemerge.merging import matching
from moemerge.merging.coefficients import Weighing
from moemerge.merging.matching import Destination, Destinations, PlannedKinds, UnitIndex
from moemerge.merging.plan import (
    MERGED,
    Account,
    Fate,
    Ledger,
    MergeBlock,
    MergePlan,
    NeuronScale,
    UnitInput,
    UnitMerge,
    copy_in_blocks,
    split_into_blocks,
)
from moemerge.merging.tokenizer.embeddings import Vocabularies
from moemerge.methods.method import METHODS, Arguments, MergeMethod
from moemerge.methods.wrappers import WRAPPERS, MergeWrapper
from moemerge.runtime.dtypes import parse_dtype

Planned = tuple[TensorInfo, list[MergeBlock]]  # an output tensor and its blocks


def open_inputs(merge: NormalisedMerge) -> dict[str, OpenModel]:
    """Open every model of the merge by name. Reads headers only."""
    models = {name: open_model(name, ref) for name, ref in merge.models.items()}
    matching.require_one_family(list(models.values()))
    if merge.whole:
        matching.require_layers(list(models.values()))
    return models


class Planner:
    """Decides every output tensor of one merge."""

    def __init__(
        self,
        loaded: LoadedConfig,
        models: Mapping[str, OpenModel],
        vocabularies: Vocabularies,
        *,
        requantise: bool,
    ) -> None:
        config, coefficients, merge = loaded.config, loaded.coefficients, loaded.merge
        self.merge = merge
        self.models = models
        self.index = {name: UnitIndex(model) for name, model in models.items()}
        self.destinations = Destinations(merge, self.index)
        self.vocabularies = vocabularies
        self.method = METHODS.get(merge.schema.name)
        router = merge.router_schema
        self.router_method = None if router is None else METHODS.get(router.name)
        self.input_dtype = None if config.dtype is None else parse_dtype(config.dtype)
        out_dtype = config.out_dtype
        self.out_dtype = self.input_dtype if out_dtype is None else parse_dtype(out_dtype)
        self.requantise = requantise
        self.whole = config.tasks is not None  # every unit is merged unsplit and with the base
        self.weighing = None if coefficients is None else Weighing(coefficients)
        self.quantised: dict[str, str] = {}  # output tensor -> model with its quantised format
        self.ledger = Ledger()
        self.missing: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.names: dict[str, set[str]] = defaultdict(set)  # role -> names of merged tensors
        self._arguments: dict[tuple[Any, ...], Arguments] = {}
        self._kinds = PlannedKinds(self.index)
        filtered = any(
            r.has_filters for r in (merge.reader, merge.router_reader, *merge.wraps) if r
        )
        self._by_kind = coefficients is None and not (requantise or filtered)

    # -- all tensors -------------------------------------------------------------------------

    def plan(self) -> MergePlan:
        tensors: list[TensorInfo] = []
        blocks: list[MergeBlock] = []
        matching.require_one_tying(
            self.models[self.merge.name_of(self.merge.donor)],
            self.models[self.destinations.reference(self.merge.slices[-1]).name],
        )
        for reference, name, to in self.destinations:
            planned = self._planned(reference, name, to)
            if planned is not None:
                tensors.append(planned[0])
                blocks.extend(planned[1])
        for (model, reference), names in self.missing.items():
            raise matching.missing_error(self.models[model], self.models[reference], names)
        if self.weighing is not None:
            self.weighing.check_all_used()
        for info, copied in self._extras({t.name for t in tensors}):
            tensors.append(info)
            blocks.extend(copied)
        return MergePlan(
            models=self.models,
            tensors=tuple(tensors),
            blocks=tuple(blocks),
            accounts=self.ledger.complete(self.models, self.merge.references),
            notices=tuple(self._notices()),
            layer_origins=tuple(self.destinations.origins()),
            quantised=self.quantised,
            input_dtype=self.input_dtype,
        )

    # -- one tensor --------------------------------------------------------------------------

    def _planned(self, reference: str, name: str, to: Destination) -> Planned | None:
        kind = self._kinds.kind(reference, name, to) if self._by_kind else None
        unit = self.index[reference].by_tensor[name][0]
        alike = self._kinds.like(kind, unit)
        if alike is not None:
            for model, account in alike.fates.items():
                self.ledger.record(model, unit.tensor, account)
            return alike.info, [alike.block]
        planned = self._tensor(reference, name, to)
        if kind is not None and planned is not None:
            info, blocks = planned
            if len(blocks) == 1 and len(blocks[0].planned) == 1:
                fates = self._fates(to.layers, blocks[0].planned)
                self._kinds.add(kind, matching.PlannedTensor(info, blocks[0], fates))
        return planned

    def _tensor(self, reference: str, name: str, to: Destination) -> Planned | None:
        index = self.index[reference]
        stored = index.model.checkpoint.tensors[name]
        units = index.by_tensor[name]
        architecture = index.model.architecture
        output = name if to.layer is None else architecture.at_layer(name, to.layer)
        keep = self.merge.router_keep
        if keep is not None and units[0].role in ROUTING_ROLES:
            return self._kept_router(keep, reference, units[0], output, to)
        matches = {
            source.name: self._find_all(units, reference, source, to)
            for source in self._slice(to).models
        }
        lacking = [m for m, pairs in matches.items() if None in pairs]
        if lacking:
            if not matching.is_auxiliary(units[0], architecture):
                for model in lacking:
                    self.missing[model, reference].append(name)
                return None
            why = f"not in every model ({', '.join(lacking)} lack it)"
            unused = Account(Fate.DROPPED, f"{why}; {reference}'s is copied")
            for model in matches.keys() - {reference, *lacking}:
                for unit in filter(None, matches[model]):
                    self.ledger.record(model, unit.tensor, unused)
            return self._copied(reference, name, output, stored, why)
        whole = cast(Mapping[str, list[Unit]], matches)  # none is missing
        if not stored.dtype.is_floating_point:
            return self._integers(reference, output, stored, whole)
        info = self._output_info(reference, output, stored, units, whole)
        merges = [self._unit(i, unit, whole, to, info) for i, unit in enumerate(units)]
        for model, account in self._fates(whole, merges).items():
            for unit in whole[model]:
                self.ledger.record(model, unit.tensor, account)
        return info, list(split_into_blocks(info, merges))

    def _fates(self, models: Iterable[str], merges: Sequence[UnitMerge]) -> dict[str, Account]:
        used = {source.model for merge in merges for source in merge.reads}
        why = f"{merges[0].method.name!r} merges the other models alone"
        unused = Account(Fate.DROPPED, why)  # a base that only provides its config
        return {m: MERGED if m in used else unused for m in models}

    def _slice(self, to: Destination) -> MergeSlice:
        return self.merge.slices[to.slice_index]

    def _find_all(
        self, units: Iterable[Unit], reference: str, source: SliceModel, to: Destination
    ) -> list[Unit | None]:
        index = self.index[source.name]
        moved = to.layers.get(source.name) != to.layers.get(reference)
        matches = []
        for unit in units:
            other = index.find(unit, self._key_in(source.name, unit, to) if moved else None)
            if other is not None and other is not unit and not self.vocabularies.spans(unit):
                matching.require_shape(unit, self.index[reference], other, index)
            matches.append(other)
        return matches

    def _output_info(
        self,
        reference: str,
        output: str,
        stored: TensorInfo,
        units: tuple[Unit, ...],
        matches: Mapping[str, list[Unit]],
    ) -> TensorInfo:
        dtypes = {model: self.index[model].info(pairs[0]).dtype for model, pairs in matches.items()}
        different = any(dtype is not stored.dtype for dtype in dtypes.values())
        if self.out_dtype is None and different:
            listed = ", ".join(f"{m}: {d}" for m, d in dtypes.items())
            raise CheckpointError(
                f"tensor {stored.name} has another dtype in each model ({listed})",
                hint="say which the result should have: `out_dtype: bfloat16` in the config",
            )
        for model, dtype in dtypes.items():
            if not dtype.is_floating_point:
                raise matching.dtype_error(stored, model, dtype)
        shape = stored.shape
        if self.vocabularies.spans(units[0]):
            shape = self.vocabularies.shape(units[0])
        return self._declare(output, shape, stored, reference)

    def _declare(
        self, output: str, shape: tuple[int, ...], stored: TensorInfo, model: str
    ) -> TensorInfo:
        """Return an output tensor, in the format that the model stores if it is requantised."""
        if self.requantise and isinstance(stored, QuantisedInfo):
            self.quantised[stored.name] = model
            return stored
        dtype = self.out_dtype if stored.dtype.is_floating_point else None
        return TensorInfo.of(output, dtype or stored.dtype, shape)

    def _unit(
        self,
        i: int,
        unit: Unit,
        matches: Mapping[str, list[Unit]],
        to: Destination,
        info: TensorInfo,
    ) -> UnitMerge:
        merge_slice = self._slice(to)
        method, reader = self._method_for(unit)
        role = str(unit.role)

        informed = method.schema.statistics is not None
        wrapped = self.merge.wraps if method is self.method else ()

        def source(s: SliceModel, scale: float | NeuronScale = 1.0) -> UnitInput:
            mine = matches[s.name][i]
            key = mine.key if informed or wrapped else None
            return UnitInput(s.name, mine.tensor, mine.slot, key, scale)

        placed = self._placed(unit, info, to)
        tensor = TensorContext(to.slice_index, placed.names, role, to.t)
        names = self.names[role]
        names.update(tensor.names)
        inputs, given = [], []
        models, base = merge_slice.seen_by(method.schema)
        for s in models:
            mine, context = matches[s.name][i], tensor
            if mine is not placed:
                context = TensorContext(to.slice_index, mine.names, role, to.t)
                names.update(context.names)
            scale: float | NeuronScale = 1.0
            if self.weighing is None:
                values = reader.values(context, s.name)
            else:
                values, scale = self.weighing.values(reader, context, s.name, mine)
            inputs.append(source(s, scale))
            given.append(values)
        arguments = self._shared(method, given, reader.values(tensor), placed)
        if not (wrapped or self.whole or self.vocabularies.spans(unit)):
            base = method.base_of(arguments, base)
        prepare = None
        if self.vocabularies.spans(unit):
            order = [s.name for s in (*models, *([] if base is None else [base]))]
            prepare = self.vocabularies.prepare(unit, order)
            placed = replace(placed, slot=WHOLE, shape=info.shape)
        return UnitMerge(
            unit=placed,
            method=method,
            arguments=arguments,
            inputs=tuple(inputs),
            base=None if base is None else source(base),
            prepare=prepare,
            wraps=tuple(
                (wrapper, self._shared(wrapper, [], reader.values(tensor), placed))
                for reader in wrapped
                for wrapper in [WRAPPERS.get(reader.schema.name)]
            ),
            whole=self.whole,
        )

    def _method_for(self, unit: Unit) -> tuple[MergeMethod, ParameterReader]:
        reader = self.merge.router_reader
        if unit.role in ROUTING_ROLES and self.router_method is not None and reader is not None:
            return self.router_method, reader
        return self.method, self.merge.reader

    def _shared(
        self,
        what: MergeMethod | MergeWrapper,
        models: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        unit: Unit,
    ) -> Arguments:
        """Return the function's arguments. Units with equal values share one object."""
        key = (what.schema.name, *(v for m in (*models, options) for v in m.values()))
        if key not in self._arguments:
            self._arguments[key] = what.arguments(models, options, unit.key)
        return self._arguments[key]

    def _placed(self, unit: Unit, info: TensorInfo, to: Destination) -> Unit:
        """Return the reference model's unit under its output name."""
        if to.layer is None or unit.layer == to.layer:
            return unit if unit.tensor == info.name else replace(unit, tensor=info.name)
        key = with_layer(unit.key, to.layer)
        return replace(unit, tensor=info.name, key=key, layer=to.layer)

    # -- copies ------------------------------------------------------------------------------

    def _kept_router(
        self, keep: str, reference: str, unit: Unit, output: str, to: Destination
    ) -> Planned:
        index = self.index[keep]
        match = index.find(unit, self._key_in(keep, unit, to))
        if match is None:
            raise matching.missing_error(index.model, self.models[reference], [unit.tensor])
        matching.require_shape(unit, self.index[reference], match, index)
        unused = Account(Fate.DROPPED, f"the routers are those of {keep}")
        for source in self._slice(to).models:
            other = self.index[source.name].find(unit, self._key_in(source.name, unit, to))
            if source.name != keep and other is not None:
                self.ledger.record(source.name, other.tensor, unused)
        return self._copied(keep, match.tensor, output, index.info(match), "router: keep")

    @staticmethod
    def _key_in(model: str, unit: Unit, to: Destination) -> str:
        """Return the key of the reference's unit in `model`, whose layer may differ."""
        layer = to.layers.get(model)
        return unit.key if layer is None else with_layer(unit.key, layer)

    def _copied(self, model: str, name: str, output: str, stored: TensorInfo, why: str) -> Planned:
        self.ledger.record(model, name, Account(Fate.COPIED, why))
        info = self._declare(output, stored.shape, stored, model)
        return info, list(copy_in_blocks(info, UnitInput(model, name, WHOLE)))

    def _integers(
        self, reference: str, output: str, stored: TensorInfo, matches: Mapping[str, list[Unit]]
    ) -> Planned:
        info = TensorInfo.of(output, stored.dtype, stored.shape)
        sources = {}
        equal = Account(Fate.COPIED, "integers, equal in all models")
        for model, units in matches.items():
            dtype = self.index[model].info(units[0]).dtype
            if dtype != stored.dtype:
                raise matching.dtype_error(stored, model, dtype)
            self.ledger.record(model, units[0].tensor, equal)
            sources[model] = UnitInput(model, units[0].tensor, WHOLE)
        first = sources.pop(reference)
        block = MergeBlock(output, None, info.shape, (), first, tuple(sources.values()))
        return info, [block]

    def _extras(self, written: set[str]) -> Iterator[Planned]:
        """Yield tensors that the reference does not have.

        Auxiliary tensors are copied; any other is an error. No tensor is lost silently.
        """
        reference = self.destinations.reference(self.merge.slices[0]).name
        known = set(self.index[reference].by_key)
        for name, index in self.index.items():
            unknown = []
            used = self.ledger.tensors(name)
            for tensor in [t for t in index.by_tensor if t not in used]:
                units = index.by_tensor[tensor]
                if units[0].role is Role.HEAD and self.index[reference].head is not None:
                    self._tied_head(name, reference, tensor)
                elif units[0].key not in known:
                    if matching.is_auxiliary(units[0], index.model.architecture):
                        yield from self._extra(name, tensor, reference, written)
                    else:
                        unknown.append(tensor)
            if unknown and self.merge.whole:
                raise matching.missing_error(self.models[reference], index.model, unknown)

    def _extra(
        self, model: str, tensor: str, reference: str, written: set[str]
    ) -> Iterator[Planned]:
        """Yield an auxiliary tensor that the reference does not have.

        With slices, layers that are not the reference's have no position and are skipped.
        """
        index = self.index[model]
        if not self.merge.whole and index.by_tensor[tensor][0].layer is not None:
            return
        why = f"not in every model ({reference} lacks it)"
        if tensor in written:
            dropped = Account(Fate.DROPPED, f"{why}; another model's is copied")
            self.ledger.record(model, tensor, dropped)
            return
        written.add(tensor)
        stored = index.model.checkpoint.tensors[tensor]
        yield self._copied(model, tensor, tensor, stored, why)

    def _tied_head(self, model: str, reference: str, tensor: str) -> None:
        if all(s.name != model for s in self.merge.slices[-1].models):
            return
        if not self.models[model].architecture.tied:
            raise ArchitectureError(
                f"{self.models[model].label} has an output head of its own ({tensor}), "
                f"but {self.models[reference].label} ties it to the embeddings",
                hint="untie the base first, or leave that model out",
            )
        self.ledger.record(model, tensor, Account(Fate.DROPPED, "a copy of the tied embeddings"))

    def _notices(self) -> Iterator[str]:
        for model in self.models.values():
            notice = model.architecture.notice
            if notice:
                yield f"{model.name}: {notice}"
            if model.checkpoint.quantisation is not None:
                yield f"{model.name}: {model.checkpoint.quantisation.coarseness}"
        yield from self.vocabularies.notices
