"""Three domains of generated problems with automatic checking: math, code and chat."""

from moemerge.testbed.tasks.checking import check, check_all
from moemerge.testbed.tasks.drawing import DOMAINS, KINDS, Split, problems
from moemerge.testbed.tasks.problem import Problem, ProblemKind

__all__ = ["DOMAINS", "KINDS", "Problem", "ProblemKind", "Split", "check", "check_all", "problems"]
