from moemerge.repairs.report import *  # noqa: F403
