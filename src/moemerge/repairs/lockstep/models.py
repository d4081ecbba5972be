from moemerge.repairs.routers import *  # noqa: F403
