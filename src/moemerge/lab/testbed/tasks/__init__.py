"""Three domains of generated problems with automatic checking: math, code and chat."""

from moemerge.lab.testbed.tasks.checking import check, check_all
from moemerge.lab.testbed.tasks.drawing import DOMAINS, KINDS, Problem, ProblemKind, Split, problems

__all__ = ["DOMAINS", "KINDS", "Problem", "ProblemKind", "Split", "check", "check_all", "problems"]
