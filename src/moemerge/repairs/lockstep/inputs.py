from moemerge.repairs.inputs import *  # noqa: F403
