"""`python -m moemerge`."""

from moemerge.cli import main

main()
