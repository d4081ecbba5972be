"""Tensors with a row per token, of models whose vocabularies may differ: the planner's view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moemerge.architectures.roles import Role, Unit
from moemerge.checkpoint import locate
from moemerge.config.models import ModelRef
from moemerge.config.resolve import NormalisedMerge
from moemerge.config.schema import TokenizerSettings
from moemerge.errors import TokenizerError
from moemerge.merging.plan import InputModel, Prepare
from moemerge.merging.tokenizer.embeddings import preparer
from moemerge.merging.tokenizer.plan import TokenizerPlan, plan_tokenizer, refuse_unlike_sizes
from moemerge.merging.tokenizer.vocab import read_vocabulary


@dataclass(frozen=True)
class Vocabularies:
    """What happens to tensors with a row per token. Without a plan: nothing, all are alike."""

    models: Mapping[str, ModelRef]
    plan: TokenizerPlan | None = None
    embedding_rows: Mapping[ModelRef, int] | None = None

    @property
    def notices(self) -> tuple[str, ...]:
        return () if self.plan is None else self.plan.warnings

    def spans(self, unit: Unit) -> bool:
        """Whether this unit has a row per token and must be brought to another vocabulary."""
        if self.plan is None or unit.layer is not None or not unit.shape:
            return False
        per_token = unit.role in (Role.EMBEDDING, Role.HEAD) and "wpe." not in unit.key
        return per_token and self._changes

    @property
    def _changes(self) -> bool:
        assert self.plan is not None
        assert self.embedding_rows is not None
        return any(self.plan.changes(m, rows) for m, rows in self.embedding_rows.items())

    def shape(self, unit: Unit) -> tuple[int, ...]:
        """The shape of such a unit in the output."""
        assert self.plan is not None
        return (self.plan.output_rows, *unit.shape[1:])

    def prepare(self, unit: Unit, order: Sequence[str]) -> Prepare:
        """Maps the tensors of the models `order` to the output's vocabulary."""
        assert self.plan is not None
        refs = [self.models[name] for name in order]
        absent = [str(m) for m in self.plan.rows if m not in refs]
        if absent:
            raise TokenizerError(
                f"{unit.tensor} is merged without {', '.join(absent)}, but the output's vocabulary "
                "is made of all models' tokens",
                hint="let every model take part in the first and the last slice, or leave "
                "`tokenizer` out",
            )
        return preparer(self.plan, refs)


def plan_vocabularies(
    merge: NormalisedMerge, models: Mapping[str, InputModel], settings: TokenizerSettings | None
) -> Vocabularies:
    """Read the tokenizers and plan the output's, or check that none is needed."""
    rows = {merge.models[name]: _embedding_rows(model) for name, model in models.items()}
    known = {ref: count for ref, count in rows.items() if count is not None}
    if settings is None:
        refuse_unlike_sizes(known)
        return Vocabularies(merge.models)
    if len(known) < len(rows):
        raise TokenizerError(
            "a model has no embedding that the tokenizer's rows could belong to",
            hint="leave `tokenizer` and `tokenizer_source` out of the config",
        )
    vocabularies = {
        merge.models[name]: read_vocabulary(
            model.checkpoint.tokenizer_folder, model.checkpoint.label
        )
        for name, model in models.items()
    }
    donor = settings.source
    if isinstance(donor, ModelRef) and donor not in vocabularies:
        # A tokenizer may come from a model that is not merged; its weights are not looked at.
        vocabularies[donor] = read_vocabulary(locate(donor.path, donor.revision), str(donor))
    order = [merge.models[name] for name in models]
    plan = plan_tokenizer(
        settings, vocabularies, base=merge.base_model, order=order, embedding_rows=known
    )
    return Vocabularies(merge.models, plan, known)


def _embedding_rows(model: InputModel) -> int | None:
    """Rows of the embedding; the head's, where it has fewer."""
    names = model.architecture.embedding_names()
    tensors = model.checkpoint.tensors
    return min((tensors[n].shape[0] for n in (names.input, names.head) if n), default=None)
