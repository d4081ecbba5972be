"""Every error a user can meet. Each says what was got, what was expected, where, and what to do.

The exit code belongs to the kind of error, so that the command line has one place to look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

LONGEST_LINE = 300  # characters of another library's message


class MoeMergeError(Exception):
    """Base of all errors raised on purpose; `hint` tells the user what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  {hint}")
        self.message = message
        self.hint = hint


class UsageError(MoeMergeError):
    """A wrong flag or argument."""

    exit_code = 2


class ConfigError(MoeMergeError):
    """A config file, or several problems of one, that cannot be run."""

    exit_code = 2

    @classmethod
    def from_problems(cls, where: str, problems: Sequence[str]) -> ConfigError:
        """All problems of a file in one error: nobody should have to fix them one run at a time."""
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        return cls("\n".join([f"{where}: {count}", *(f"  {p}" for p in problems)]))


class CheckpointError(MoeMergeError):
    """A model folder, shard, tensor or output folder that cannot be used."""

    exit_code = 3


class ArchitectureError(CheckpointError):
    """A model whose structure does not allow what was asked."""


class TokenizerError(CheckpointError):
    """A tokenizer that cannot be read, merged or applied."""


class DataError(MoeMergeError):
    """Calibration or evaluation text that cannot be used."""

    exit_code = 3


class ResourceError(MoeMergeError):
    """Not enough memory or disk, found before the work starts."""

    exit_code = 3


class NumericalError(MoeMergeError):
    """Non-finite values, or a solve that did not converge where it had to."""

    exit_code = 4


@contextlib.contextmanager
def library_errors(
    raises: Callable[..., MoeMergeError], what: str, *, hint: str | None = None
) -> Iterator[None]:
    """Whatever a library raises inside, fed with a user's file, becomes an error of ours.

    Libraries promise little about what they raise for a damaged file, and panics of those in Rust
    are no `Exception`; so this is broad, and belongs around single calls only.
    """
    try:
        yield
    except (MoeMergeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise raises(f"{what} ({in_one_line(error)})", hint=hint) from error


def in_one_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    line = next(iter(str(error).splitlines()), "")[:LONGEST_LINE]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
