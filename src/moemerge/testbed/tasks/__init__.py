"""Three domains of generated problems with automatic checking: math, code and chat."""

from moemerge.testbed.tasks.checking import check, check_all
from moemerge.testbed.tasks.drawing import DOMAINS, FAMILIES, Split, problems
from moemerge.testbed.tasks.problem import Family, Problem

__all__ = ["DOMAINS", "FAMILIES", "Family", "Problem", "Split", "check", "check_all", "problems"]
