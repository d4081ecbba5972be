from moemerge.runtime.imports import import_transformers

import_transformers()
