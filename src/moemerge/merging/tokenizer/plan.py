"""Plan the output's vocabulary and the source of each embedding row, without reading tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from moemerge.config.models import ModelRef
from moemerge.config.schema import TokenEntry, TokenizerSettings, TokenSource
from moemerge.errors import TokenizerError
from moemerge.merging.tokenizer.vocab import AddedToken, Vocabulary, next_id
from moemerge.registry import did_you_mean
from moemerge.runtime.lazy import torch
from moemerge.runtime.progress import counted

if TYPE_CHECKING:
    from torch import Tensor


MISSING: Final = -1  # in `TokenizerPlan.rows`: the model has no row for this token
RowSources = tuple[tuple[ModelRef, int], ...]  # rows to average; empty means zero
OwnIds = Mapping[ModelRef, Mapping[str, int]]  # each model's tokens with a row in its embedding


@dataclass(frozen=True)
class TokenizerPlan:
    """The output's vocabulary, and the mapping of each model to it."""

    donor: ModelRef  # provides the tokenizer files
    vocabulary: Vocabulary  # of the output
    appended: tuple[str, ...]  # tokens that the donor does not have, by id
    dropped: frozenset[str]  # tokens of the donor without a row in its embedding
    tokens: Tensor  # (tokens,) ids in use, ascending; all other rows hold the mean
    rows: Mapping[ModelRef, Tensor]  # (tokens,) row in the model's own embedding, or MISSING
    fill: Mapping[int, RowSources]  # position in `tokens` -> sources of a missing row
    output_rows: int
    changes: bool  # whether the mapping changes any model's embedding
    warnings: tuple[str, ...]


def plan_tokenizer(
    settings: TokenizerSettings,
    vocabularies: Mapping[ModelRef, Vocabulary],
    *,
    base: ModelRef | None,
    order: Sequence[ModelRef],
    embedding_rows: Mapping[ModelRef, int],
) -> TokenizerPlan:
    """Plan the output's vocabulary.

    `order` lists the merged models in the config's order; `embedding_rows` has their numbers of
    rows (the smaller of embedding and head). `vocabularies` has those models and, if `source` names
    another model, that model.
    """
    first = base if base is not None else order[0]
    models = tuple(m for m in dict.fromkeys((first, *order)) if m in embedding_rows)
    donor = settings.source if isinstance(settings.source, ModelRef) else first
    own: OwnIds = {
        m: {t: i for t, i in vocabularies[m].ids.items() if i < embedding_rows[m]} for m in models
    }

    donated, dropped = _trim(vocabularies[donor], embedding_rows.get(donor))
    extra: list[AddedToken] = []
    if settings.source == "union":
        extra += _union(models, vocabularies, own)
    extra += [AddedToken(t, normalized=True) for t in settings.tokens]
    vocabulary, appended = _append(donated, extra)

    overrides = _overrides(settings.tokens, vocabularies, own, embedding_rows)
    forced = {t for t, entry in settings.tokens.items() if entry.force}
    ids = _by_id(vocabulary)
    rows = {m: _gather(own[m], ids, forced) for m in models}
    missing = torch.stack([r == MISSING for r in rows.values()]).any(0).nonzero().flatten().tolist()
    fill = {
        i: overrides[ids[i][0]] if ids[i][0] in overrides else _others(ids[i][0], base, own)
        for i in missing
    }
    empty = [ids[i][0] for i, sources in fill.items() if not sources]
    empty = [token for token in empty if token not in overrides]
    multiple = settings.pad_to_multiple_of or 1
    output_rows = -(-(ids[-1][1] + 1) // multiple) * multiple
    return TokenizerPlan(
        donor=donor,
        vocabulary=vocabulary,
        appended=appended,
        dropped=dropped,
        tokens=torch.tensor([i for _, i in ids], dtype=torch.long),
        rows=rows,
        fill=fill,
        output_rows=output_rows,
        changes=any(
            embedding_rows[m] != output_rows or not torch.equal(r, torch.arange(output_rows))
            for m, r in rows.items()
        ),
        warnings=tuple(_warnings(donor, dropped, appended, vocabularies, empty)),
    )


def refuse_unlike_sizes(embedding_rows: Mapping[ModelRef, int]) -> None:
    """Refuse embeddings of different sizes if there is no tokenizer setting, as mergekit does."""
    if len(set(embedding_rows.values())) > 1:
        sizes = ", ".join(f"{m}: {n}" for m, n in embedding_rows.items())
        raise TokenizerError(
            f"the models' embeddings have different numbers of rows ({sizes})",
            hint="say which vocabulary the result shall have: add `tokenizer_source: base` (or "
            "union, or a model) to the config",
        )


def _trim(donor: Vocabulary, rows: int | None) -> tuple[Vocabulary, frozenset[str]]:
    """Return the donor without the tokens that its embedding has no row for, and those tokens."""
    if rows is None:
        return donor, frozenset()
    beyond = [t for t, i in donor.model_ids.items() if i >= rows]
    if beyond:
        raise TokenizerError(
            f"{donor.label}: {counted(len(beyond), 'token')} of its tokenizer, such as "
            f"{beyond[0]!r} (id {donor.model_ids[beyond[0]]}), beyond its embedding of {rows} rows",
            hint="the tokenizer and the weights do not belong together; choose another "
            "`tokenizer_source`",
        )
    dropped = frozenset(t for t, i in donor.added_ids.items() if i >= rows)
    kept = {t: i for t, i in donor.added_ids.items() if t not in dropped}
    added = {t: a for t, a in donor.added.items() if t not in dropped}
    return replace(donor, added_ids=kept, added=added), dropped


def _union(
    models: Sequence[ModelRef], vocabularies: Mapping[ModelRef, Vocabulary], own: OwnIds
) -> list[AddedToken]:
    """Return all models' tokens: ordinary ones model by model, then added ones model by model."""
    by_id = {m: sorted(own[m], key=own[m].__getitem__) for m in models}
    added: dict[str, AddedToken] = {}
    for m in models:
        for token in by_id[m]:
            if token in vocabularies[m].added:
                added.setdefault(token, vocabularies[m].added[token])
    ordinary = dict.fromkeys(t for m in models for t in by_id[m] if t not in added)
    return [*(AddedToken(t, normalized=True) for t in ordinary), *added.values()]


def _append(donor: Vocabulary, extra: Iterable[AddedToken]) -> tuple[Vocabulary, tuple[str, ...]]:
    """Append the missing tokens of `extra` to the donor, with the ids that loading assigns."""
    added_ids, added = dict(donor.added_ids), dict(donor.added)
    taken = set(donor.ids.values())
    appended = []
    index = next_id(donor.model_ids, added_ids)
    for token in extra:
        if token.content in donor.model_ids or token.content in added_ids:
            continue
        if index in taken:
            raise TokenizerError(
                f"{donor.label}: its token ids have gaps, and a token appended to it "
                f"({token.content!r}) would get id {index}, which is in use",
                hint="choose another model as `tokenizer_source`, or `base` without new tokens",
            )
        added_ids[token.content], added[token.content] = index, token
        appended.append(token.content)
        index += 1
    return replace(donor, added_ids=added_ids, added=added), tuple(appended)


def _overrides(
    entries: Mapping[str, TokenEntry],
    vocabularies: Mapping[ModelRef, Vocabulary],
    own: OwnIds,
    embedding_rows: Mapping[ModelRef, int],
) -> dict[str, RowSources]:
    """Return the row that `tokens:` names for each token. One error reports all faults."""
    overrides: dict[str, RowSources] = {}
    problems = []
    for token, entry in entries.items():
        source = entry.source
        if source is None:
            if entry.force:
                problems.append(f"{token!r}: `force` needs a `source`")
            elif not any(token in v.ids for v in vocabularies.values()):
                problems.append(f"{token!r}: no model has this token; give it a `source`")
            continue
        if isinstance(source, TokenSource) and source.kind == "zero":
            overrides[token] = ()
            continue
        row = _named_row(token, source, own, embedding_rows)
        if isinstance(row, str):
            problems.append(f"{token!r}: {row}")
        else:
            overrides[token] = (row,)
    if problems:
        raise TokenizerError(
            "\n".join(["tokenizer.tokens:", *(f"  {p}" for p in problems)]),
            hint="name a model of this merge and a token or token_id that it has",
        )
    return overrides


def _named_row(
    token: str,
    source: ModelRef | TokenSource,
    own: OwnIds,
    embedding_rows: Mapping[ModelRef, int],
) -> tuple[ModelRef, int] | str:
    """Return the model and its row, or the reason why there is none."""
    model = source if isinstance(source, ModelRef) else source.model
    assert model is not None  # the config requires it for a model_token
    if model not in own:
        return f"{model} takes no part in this merge"
    wanted = token
    if isinstance(source, TokenSource):
        if source.token_id is not None:
            rows = embedding_rows[model]
            if source.token_id >= rows:
                return f"id {source.token_id} lies beyond the {rows} rows of {model}"
            return model, source.token_id
        wanted = source.token or token
    if wanted not in own[model]:
        return f"{model} has no token {wanted!r}{did_you_mean(wanted, own[model])}"
    return model, own[model][wanted]


def _by_id(vocabulary: Vocabulary) -> list[tuple[str, int]]:
    """Return (token, id) by ascending id. If tokens share an id (a broken file), use the first."""
    tokens: dict[int, str] = {}
    for token, index in vocabulary.ids.items():
        tokens.setdefault(index, token)
    return [(tokens[index], index) for index in sorted(tokens)]


def _gather(own: Mapping[str, int], ids: list[tuple[str, int]], forced: set[str]) -> Tensor:
    rows = [MISSING if t in forced else own.get(t, MISSING) for t, _ in ids]
    return torch.tensor(rows, dtype=torch.long)


def _others(token: str, base: ModelRef | None, own: OwnIds) -> RowSources:
    """Return the base's row, or the rows of all models that have the token."""
    if base is not None and token in own.get(base, ()):
        return ((base, own[base][token]),)
    return tuple((m, tokens[token]) for m, tokens in own.items() if token in tokens)


def _warnings(
    donor: ModelRef,
    dropped: frozenset[str],
    appended: Sequence[str],
    vocabularies: Mapping[ModelRef, Vocabulary],
    empty: Sequence[str],
) -> Iterator[str]:
    """Yield warnings; `empty` are the tokens with rows of zeros that no setting requests."""
    if dropped:
        names = ", ".join(sorted(dropped)[:5])
        yield (
            f"{donor}: left out {counted(len(dropped), 'token')} that its embedding has no row for "
            f"({names}); if one of them is its pad or eos token, set another after the merge"
        )
    known = {t for v in vocabularies.values() for t in v.model_ids}
    marked = {t for v in vocabularies.values() for t in v.added}
    ordinary = [t for t in appended if t in known and t not in marked]
    if ordinary:
        yield (
            f"{counted(len(ordinary), 'ordinary token')}, such as {ordinary[0]!r}, appended to the "
            "tokenizer as whole words to be found in text; merge rules are not taken over"
        )
    if empty:
        count = counted(len(empty), "token")
        yield f"{count}, such as {empty[0]!r}, in no model; given rows of zeros"
