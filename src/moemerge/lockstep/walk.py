"""The whole of a job that visits routers: stop, visit, replace, note, go on.

    with open_output(...) as output, open_lockstep(sides, batches, settings, ...) as lockstep:
        output.begin(key, names, resume=resume)     # a journal, and OUT in the making
        walk(lockstep, routers, visitor, output)
        output.finish(files)

A visitor gets a router with its counterparts, and all models waiting at it, and gives what it
finished: tensors as they will be stored, and a row of the report. The leading model goes on with
these tensors, so that the features of every later router are those of the model as it will be.
A job with other stops (any module, a layer at a time) has a loop of its own over
`features.stream.ModelStream`, with the same `Output`.
"""

from __future__ import annotations

from collections.abc import Sequence

from moemerge.errors import ArchitectureError
from moemerge.lockstep.journal import Entry
from moemerge.lockstep.models import PairedRouter
from moemerge.lockstep.output import Output
from moemerge.lockstep.streams import Lockstep, Stops
from moemerge.runtime import ranks


class Visitor:
    """What a job does at routers."""

    def visit(self, pair: PairedRouter, stops: Stops) -> Entry | None:
        """All models wait at a router. None where it stays as it is."""
        raise NotImplementedError

    def added(self, entry: Entry) -> None:
        """What was finished is in the journal now."""

    def resumed(self, entry: Entry) -> None:
        """A killed run had finished this router; it is not visited."""


def walk(
    lockstep: Lockstep, routers: Sequence[PairedRouter], visitor: Visitor, output: Output
) -> None:
    """Visit every router in the order the models run them."""
    label, left = lockstep.model.label, {pair.info.weight: pair for pair in routers}
    for stops in lockstep:
        with lockstep.stopwatch.span("journal"):
            output.check()
        name = stops.lead.weight_name
        pair = left.pop(name, None)
        if pair is None:
            raise ArchitectureError(
                f"{label}: {name} is run as a router, but the table of families knows nothing of it"
            )
        entry = output.finished(name)
        if entry is not None:
            visitor.resumed(entry)
        else:
            entry = ranks.from_lead(visitor.visit(pair, stops))
            if entry is not None:
                with lockstep.stopwatch.span("journal"):
                    output.add(entry)
                visitor.added(entry)
        if entry is not None:
            stops.lead.replace_stored(entry.tensors)
    output.check()
    ranks.meet()  # others may still read the journal
    if left:
        raise ArchitectureError(
            f"{label}: the model never ran {', '.join(sorted(left))}",
            hint="config.json and weights may not belong together",
        )
