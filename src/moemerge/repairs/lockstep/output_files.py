from moemerge.repairs.card import *  # noqa: F403
