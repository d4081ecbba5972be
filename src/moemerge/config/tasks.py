"""What a task file says: what is asked, of which data, and how answers are judged."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from moemerge.config.fields import PositiveInt, Strict
from moemerge.config.generation import MAX_NEW_TOKENS, PromptSettings, Texts
from moemerge.config.reading import FaultReporter, read_document
from moemerge.config.settings import Flag
from moemerge.config.translate import WorkingCopy, validate


class PublishedScoring(Strict):
    """What protocol `paper` does otherwise."""

    verify: str | None = Field(None, description="how answers are judged there")
    samples: PositiveInt | None = Field(None, description="only so many samples count there")


class TaskSettings(PromptSettings):
    """A task. Its completions do not depend on the protocol, only their scores do."""

    title: str = Field(description="its name in tables")
    domain: str = Field("other", description="tasks of one domain are averaged")
    data: str | None = Field(
        None, description="a file, or files of a hub data set: org/name@revision:PATTERN"
    )
    problems: PositiveInt | None = Field(None, description="how many the data should hold")
    verify: str = Field(description="how answers are judged")
    paper: PublishedScoring | None = Field(None, description="what protocol `paper` does otherwise")
    needs_chat_template: Flag = Field(
        False, description="refuse models without one (unless they are asked in plain text)"
    )
    max_new_tokens: PositiveInt = Field(1024, description=MAX_NEW_TOKENS)
    stop: Texts = Field((), description="texts that end a completion, and are not part of it")


def load_task(path: Path) -> TaskSettings:
    """Read a task file; all that is wrong with it comes in one error."""
    where, document = read_document(path)
    faults = list(document.faults)
    task = validate(TaskSettings, WorkingCopy(document.data), faults.append)
    FaultReporter(where, document, lenient=False).judge(faults)
    assert task is not None  # otherwise a fault was noted
    return task
