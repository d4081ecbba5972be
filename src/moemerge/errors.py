"""Error classes. A message states what was found, what was expected, where, and a remedy.

Each class defines its exit code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

LONGEST_LINE = 300  # characters kept of another library's message


class MoeMergeError(Exception):
    """Base of all our errors; `hint` states the remedy."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  {hint}")
        self.message = message
        self.hint = hint


class UsageError(MoeMergeError):
    """A wrong flag or argument."""

    exit_code = 2


class ConfigError(MoeMergeError):
    """A config with one or more problems."""

    exit_code = 2

    @classmethod
    def from_problems(
        cls, where: str, problems: Sequence[str], *, hint: str | None = None
    ) -> ConfigError:
        """Return one error with all problems of a file."""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        return cls("\n".join([f"{where}: {count}", *(f"  {p}" for p in problems)]), hint=hint)


class CheckpointError(MoeMergeError):
    """A model folder, shard, tensor or output folder that cannot be used."""

    exit_code = 3


class ArchitectureError(CheckpointError):
    """A model whose structure does not support the request."""


class TokenizerError(CheckpointError):
    """A tokenizer that cannot be read, merged or applied."""


class DataError(MoeMergeError):
    """Calibration or evaluation text that cannot be used."""

    exit_code = 3


class ResourceError(MoeMergeError):
    """Not enough memory or disk, found before the work starts."""

    exit_code = 3


class NumericalError(MoeMergeError):
    """Non-finite values, or a solve that did not converge."""

    exit_code = 4


@contextlib.contextmanager
def library_errors(
    raises: Callable[..., MoeMergeError], what: str, *, hint: str | None = None
) -> Iterator[None]:
    """Convert any exception of a library that reads a user's file into `raises`.

    Libraries rarely document what they raise for a damaged file, and panics of Rust code are not
    `Exception`. The except clause is therefore broad; use this around single calls only.
    """
    try:
        yield
    except (MoeMergeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise raises(f"{what} ({in_one_line(error)})", hint=hint) from error


def in_one_line(error: BaseException) -> str:
    """Return the class name and the first line of an exception's message."""
    line = next(iter(str(error).splitlines()), "")[:LONGEST_LINE]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
