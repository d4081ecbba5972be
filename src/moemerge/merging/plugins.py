"""Merge methods that other packages bring along, by the entry point `moemerge.methods`."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points

from moemerge.errors import UsageError

GROUP = "moemerge.methods"


@functools.cache
def load_plugins() -> tuple[str, ...]:
    """Import every module that is registered under the group, once; their names."""
    found = entry_points(group=GROUP)
    for entry in found:
        try:
            entry.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"the plugin {entry.name!r} ({entry.value}) cannot be imported: {error}",
                hint="repair or uninstall the package that brings it",
            ) from error
    return tuple(entry.name for entry in found)
