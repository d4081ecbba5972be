from moemerge.repairs.experts import *  # noqa: F403
