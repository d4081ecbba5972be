"""Semantic checks of a parsed config: method requirements, slices, parameters."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moemerge.config.coefficients import WEIGHT, unweighed_faults
from moemerge.config.faults import Fault, Path, listed, suggested
from moemerge.config.models import ModelRef
from moemerge.config.parameter_values import (
    ROLE_PREFIX,
    Branch,
    Conditional,
    ParameterReader,
    TensorContext,
    Values,
    leaves,
)
from moemerge.config.parameters import (
    REQUIRED,
    BasePolicy,
    MethodSchema,
    ParameterSpec,
    WrapperSchema,
)
from moemerge.config.requests import repair_faults, statistics_faults
from moemerge.config.resolve import (
    NormalisedMerge,
    entries,
    name_faults,
    normalise,
    reference_faults,
    shared_range,
)
from moemerge.config.schema import RunConfig, SliceEntry, kept_faults
from moemerge.registry import did_you_mean


def config_faults(
    config: RunConfig, schemas: Mapping[str, MethodSchema], wrappers: Mapping[str, WrapperSchema]
) -> Iterator[Fault]:
    """Report everything in a config that contradicts itself or its method."""
    whole = bool(config.body.models or config.body.slices)
    if not whole:
        yield Fault(body_prefix(config), "nothing to merge: give `models` or `slices`")
    yield from method_faults(config, schemas)
    yield from slice_faults(config)
    yield from name_faults(config, body_prefix(config))
    yield from tokenizer_faults(config)
    yield from wrap_faults(config, schemas, wrappers)
    yield from kept_faults(config, schemas)
    yield from reference_faults(config)
    yield from repair_faults(config)
    if config.merge_method not in schemas:
        return
    check = MethodCheck(config, schemas)
    yield from check.parameters()
    bases = list(check.bases()) if whole else []
    yield from bases
    if bases or not whole:
        return
    merge = normalised_for_checks(config, schemas, wrappers)
    yield from check.counts(merge)
    misspelt = check.misspelt()  # reported as such
    if config.coefficients is not None:
        misspelt.add(WEIGHT)
        yield from unweighed_faults(merge, ("coefficients",))
    yield from check.required(merge, misspelt)
    yield from statistics_faults(config, merge)


def tokenizer_faults(config: RunConfig) -> Iterator[Fault]:
    """Report two forms of the tokenizer, and `base` without a base."""
    if config.tokenizer is not None and config.tokenizer_source is not None:
        text = "give either tokenizer_source or tokenizer: {source: ...}, not both"
        yield Fault(("tokenizer_source",), text)
    if config.base_model is None:
        text = "'base' means the base_model's tokenizer, and there is no base_model"
        if config.tokenizer_source == "base":
            yield Fault(("tokenizer_source",), text)
        if config.tokenizer is not None and config.tokenizer.source == "base":
            yield Fault(("tokenizer", "source"), text)


def body_prefix(config: RunConfig) -> Path:
    """Return the path of the mapping that contains `models` or `slices`."""
    return ("modules", "default") if config.modules else ()


def lacks_base(config: RunConfig) -> bool:
    """Return whether some layers are merged without a base model."""
    slices = config.body.slices or ()
    own = bool(slices) and all(entry.base_model is not None for entry in slices)
    return config.base_model is None and not own


def method_faults(config: RunConfig, schemas: Mapping[str, MethodSchema]) -> list[Fault]:
    """Report misspelt methods."""
    named: list[tuple[Path, str]] = [(("merge_method",), config.merge_method)]
    if config.router is not None and config.router.merge_method is not None:
        named.append((("router", "merge_method"), config.router.merge_method))
    return [
        Fault(path, f"unknown merge method {name!r}{suggested(name, sorted(schemas))}")
        for path, name in named
        if name not in schemas
    ]


def slice_faults(config: RunConfig) -> Iterator[Fault]:
    """Report models listed twice, and ranges of different length."""
    prefix = body_prefix(config)
    seen: set[ModelRef] = set()
    for i, entry in enumerate(config.body.models or ()):
        if entry.model in seen:
            yield Fault((*prefix, "models", i, "model"), f"{entry.model} is listed twice")
        seen.add(entry.model)
    for i, slice_entry in enumerate(config.body.slices or ()):
        here = (*prefix, "slices", i)
        yield from (
            Fault((*here, "sources", j, "model"), f"{s.model} is listed twice in this slice")
            for j, s in enumerate(slice_entry.sources)
            if any(s.model == other.model for other in slice_entry.sources[:j])
        )
        lengths = [s.layer_range[1] - s.layer_range[0] for s in slice_entry.sources]
        if len(set(lengths)) > 1:
            counts = listed(map(str, lengths))
            text = f"all sources of a slice need the same number of layers, got {counts}"
            yield Fault((*here, "sources"), text)


@dataclass(frozen=True)
class Scope:
    """One `parameters:` mapping of the file."""

    path: Path
    values: Values
    known: Mapping[str, ParameterSpec]
    method: str
    kind: str = "wide"  # or "model", or "base"
    ignorable: bool = True  # whether mergekit ignores an unknown parameter there


@dataclass(frozen=True)
class ConfigFilter:
    """A filter of the file: one branch of a value."""

    path: Path
    value: Conditional
    number: int

    @property
    def branch(self) -> Branch:
        return self.value.branches[self.number]


@dataclass(frozen=True)
class MethodCheck:
    """Checks a config against the schema of its method, and of its routers' method."""

    config: RunConfig
    schemas: Mapping[str, MethodSchema]

    @property
    def schema(self) -> MethodSchema:
        return self.schemas[self.config.merge_method]

    @property
    def router(self) -> MethodSchema | None:
        settings = self.config.router
        name = settings.merge_method if settings else None
        return self.schemas.get(name) if name is not None else None

    def bases(self) -> Iterator[Fault]:
        """Report a missing base model if a method needs one."""
        for path, schema in ((("base_model",), self.schema), (("router",), self.router)):
            if schema is None or schema.base is not BasePolicy.REQUIRED:
                continue
            if lacks_base(self.config):
                yield Fault(path, f"merge method {schema.name!r} needs a base_model")
        yield from self._unplaced_bases()

    def _unplaced_bases(self) -> Iterator[Fault]:
        for i, entry in enumerate(self.config.body.slices or ()):
            base = entry.base_model or self.config.base_model
            if base is None or any(source.model == base for source in entry.sources):
                continue
            place = (*body_prefix(self.config), "slices", i, "sources")
            if self.schema.base is BasePolicy.MEMBER:
                if self.router is not None and self.router.base is BasePolicy.REQUIRED:
                    text = f"{self.router.name!r} of the routers needs the base: list {base} too"
                    yield Fault(place, text)
            elif shared_range(entry.sources) is None:
                text = f"the sources have different layer ranges: list {base} with its own as well"
                yield Fault(place, text)

    def counts(self, merge: NormalisedMerge) -> Iterator[Fault]:
        """Report too few or too many models for a method."""
        place = "models" if self.config.body.models is not None else "slices"
        for i, merge_slice in enumerate(merge.slices):
            path: Path = (*body_prefix(self.config), place)
            for schema in filter(None, (self.schema, self.router)):
                inputs, _ = merge_slice.seen_by(schema)
                number = len(inputs)
                most = schema.max_models if schema.max_models is not None else number
                if not schema.min_models <= number <= most:
                    names = listed(source.name for source in inputs)
                    text = f"{schema.name!r} merges {_needs(schema)}, got {number}: {names}"
                    yield Fault(path if place == "models" else (*path, i), text)

    def parameters(self) -> Iterator[Fault]:
        """Report unknown parameters and impossible values, in every scope."""
        for scope in self._scopes():
            if scope.kind == "base" and scope.values:
                text = f"the base model's parameters have no effect in {self.schema.name!r}"
                yield Fault(scope.path, f"{text} (mergekit ignores them): remove them", True)
            elif scope.kind != "base":
                yield from scope_faults(scope)

    def filters(self) -> Iterator[ConfigFilter]:
        """Return every filter with its path."""
        parameters = {scope.path: scope.values for scope in self._scopes()}
        for n, entry in enumerate(self.config.wrap or ()):
            parameters["wrap", n, "parameters"] = entry.parameters
        for path, values in parameters.items():
            for name, value in values.items():
                if isinstance(value, Conditional):
                    for i, branch in enumerate(value.branches):
                        if branch.filter is not None:
                            yield ConfigFilter((*path, name, i, "filter"), value, i)

    def misspelt(self) -> set[str]:
        """Return known parameters that an unknown one was probably meant to be."""
        return {
            known
            for scope in self._scopes()
            for name in scope.values
            for known in scope.known
            if name not in scope.known and repr(known) in did_you_mean(name, scope.known)
        }

    def _scopes(self) -> Iterator[Scope]:
        prefix, body = body_prefix(self.config), self.config.body
        known, method = self._known(), self.schema.name
        yield Scope(("parameters",), self.config.parameters, known, method)
        if prefix:
            yield Scope((*prefix, "parameters"), body.parameters, known, method)
        for i, slice_entry in enumerate(body.slices or ()):
            path: Path = (*prefix, "slices", i, "parameters")
            yield Scope(path, slice_entry.parameters, known, method)
        for place, entry in entries(body):
            kind = "base" if self._is_base(place, entry.model) else "model"
            path = (*prefix, *place, "parameters")
            yield Scope(path, entry.parameters, known, method, kind)
        if self.config.router is not None and self.router is not None:
            own = {spec.name: spec for spec in self.router.parameters}
            path = ("router", "parameters")
            yield Scope(path, self.config.router.parameters, own, self.router.name)

    def _known(self) -> dict[str, ParameterSpec]:
        """Return the method's parameters, and per-model ones that the router's method adds."""
        added = [spec for spec in (self.router.parameters if self.router else ()) if spec.per_model]
        return {spec.name: spec for spec in (*added, *self.schema.parameters)}

    def _is_base(self, path: Path, model: ModelRef) -> bool:
        base = self.config.base_model
        if path[0] == "slices" and self.config.body.slices is not None:
            entry: SliceEntry = self.config.body.slices[int(path[1])]
            base = entry.base_model or base
        return model == base and self.schema.base is not BasePolicy.MEMBER

    def required(self, merge: NormalisedMerge, known: Container[str] = ()) -> Iterator[Fault]:
        """Report parameters without a default that no scope sets, except those in `known`."""
        for reader in filter(None, (merge.reader, merge.router_reader)):
            for spec in reader.schema.parameters:
                if spec.default is REQUIRED and spec.name not in known:
                    yield from _unset(reader, spec, merge)


def _unset(reader: ParameterReader, spec: ParameterSpec, merge: NormalisedMerge) -> Iterator[Fault]:
    start = f"{reader.schema.name!r} needs the parameter {spec.name!r}, which is not set"
    if not spec.per_model:
        if any(not reader.is_set(i, None, spec) for i in range(len(merge.slices))):
            yield Fault((), f"{start}: give it in the top `parameters:`")
        return
    lacking = dict.fromkeys(
        source.name
        for i, merge_slice in enumerate(merge.slices)
        for source in merge_slice.seen_by(reader.schema)[0]
        if not reader.is_set(i, source.name, spec)
    )
    if lacking:
        text = "give it under each model or in the top `parameters:`"
        if any(merge.models[name] == merge.base_model for name in lacking):
            text += f". {reader.schema.name!r} merges base_model too: remove it to leave it out"
        yield Fault((), f"{start} for {listed(lacking)}: {text}")


def normalised_for_checks(
    config: RunConfig,
    schemas: Mapping[str, MethodSchema],
    wrappers: Mapping[str, WrapperSchema],
) -> NormalisedMerge:
    """Return the planner's view, even if the router section or wrappers are faulty."""
    wraps = tuple(entry for entry in config.wrap or () if entry.wrapper in wrappers)
    if wraps != (config.wrap or ()):
        config = config.model_copy(update={"wrap": wraps or None})
    router = config.router
    if router is not None and (router.merge_method is None or router.merge_method not in schemas):
        config = config.model_copy(update={"router": None})
    return normalise(config, schemas, wrappers)


def _needs(schema: MethodSchema) -> str:
    low, high = schema.min_models, schema.max_models
    number = f"{low}" if low == high else f"{low} to {high}"
    if high is None:
        number = f"at least {low}"
    besides = "" if schema.base is BasePolicy.MEMBER else " besides the base"
    return f"{number} {'model' if number.split()[-1] == '1' else 'models'}{besides}"


def scope_faults(scope: Scope) -> Iterator[Fault]:
    """Report unknown parameters, and faults of the others' values, each at its own path."""
    for name, value in scope.values.items():
        spec, path = scope.known.get(name), (*scope.path, name)
        if spec is None:
            close = suggested(name, scope.known, f"{scope.method!r} takes")
            yield Fault(path, f"unknown parameter{close}", scope.ignorable)
        elif scope.kind == "model" and not spec.per_model:
            text = (
                f"{name} is a parameter of the whole method and has no effect under a model "
                "(mergekit ignores it): move it to the top `parameters:`"
            )
            yield Fault(path, text, True)
        else:
            for place, leaf in leaves(value):
                why = spec.fault(leaf)
                if why is not None:
                    quoted = isinstance(leaf, str) and spec.type is not str and _is_number(leaf)
                    yield Fault((*path, *place), f"{why} (remove the quotes)" if quoted else why)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- wrappers -------------------------------------------------------------------------------------

WRAP: Path = ("wrap",)


def wrap_faults(
    config: RunConfig, schemas: Mapping[str, MethodSchema], wrappers: Mapping[str, WrapperSchema]
) -> Iterator[Fault]:
    """Report misspelt wrappers and parameters, and methods that cannot be wrapped."""
    method = schemas.get(config.merge_method)
    for i, entry in enumerate(config.wrap or ()):
        place: Path = (*WRAP, i)
        schema = wrappers.get(entry.wrapper)
        if schema is None:
            close = suggested(entry.wrapper, sorted(wrappers))
            yield Fault(place, f"unknown wrapper {entry.wrapper!r}{close}")
            continue
        if any(entry.wrapper == other.wrapper for other in (config.wrap or ())[:i]):
            yield Fault(place, f"{entry.wrapper!r} is listed twice")
        known = {spec.name: spec for spec in schema.parameters}
        scope = Scope((*place, "parameters"), entry.parameters, known, schema.name, ignorable=False)
        yield from scope_faults(scope)
        if method is not None:
            yield from _unfit(place, method, schema)
    if config.wrap and method is not None and method.base is BasePolicy.MEMBER:
        text = f"{method.name!r} takes the base for a model like the others, and a wrapper needs it"
        yield Fault(WRAP, f"{text} apart: use 'task_arithmetic', with weights that sum to 1")
    elif config.wrap and lacks_base(config):
        yield Fault(WRAP, "wrappers need a base_model")


def _unfit(place: Path, method: MethodSchema, schema: WrapperSchema) -> Iterator[Fault]:
    if not schema.turns:
        return
    if method.max_models == 1:
        text = f"{schema.name!r} aligns several models, and {method.name!r} takes one"
        yield Fault(place, text)
    if method.statistics == "fisher":
        text = f"{method.name!r} knows single weights, which {schema.name!r} turns into others"
        yield Fault(place, text)


# --- filters without effect -----------------------------------------------------------------------


def filter_faults(
    filters: Sequence[ConfigFilter],
    readers: Sequence[ParameterReader],
    names: Mapping[str, Collection[str]],
) -> Iterator[Fault]:
    """Report filters that match no tensor, or whose tensors all get their value elsewhere.

    The readers have looked up the parameters of every tensor. `names` are the merged tensors by
    role.
    """
    for item in filters:
        wanted = item.branch.filter
        assert wanted is not None  # a catch-all has no pattern
        asked = [r.decided[id(item.value)] for r in readers if id(item.value) in r.decided]
        tensors = (TensorContext(0, tuple(own), role) for role, own in names.items())
        if not any(item.branch.matches(tensor) for tensor in tensors):
            yield Fault(item.path, f"{wanted!r} matches no tensor{_meant(wanted, names)}", True)
        elif asked and not any(item.number in decided for decided in asked):
            text = "all its tensors get their value from a filter before it, or from a nearer scope"
            yield Fault(item.path, f"{wanted!r} has no effect: {text}", True)


def _meant(wanted: str, names: Mapping[str, Collection[str]]) -> str:
    if wanted.startswith(ROLE_PREFIX):
        return f"; the merged tensors have the roles {listed(sorted(names))}"
    words = {word for own in names.values() for name in own for word in name.split(".")}
    close = did_you_mean(wanted, sorted(words)) if "." not in wanted else ""
    return close or "; a filter is part of a tensor's name"
