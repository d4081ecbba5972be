"""The merge methods, one module each; importing this package registers them."""

from moemerge.merging.methods import (
    breadcrumbs,
    dare,
    della,
    karcher,
    linear,
    model_stock,
    multislerp,
    nearswap,
    nuslerp,
    passthrough,
    sce,
    slerp,
    task_arithmetic,
    ties,
    wudi,
)

__all__ = [
    "breadcrumbs",
    "dare",
    "della",
    "karcher",
    "linear",
    "model_stock",
    "multislerp",
    "nearswap",
    "nuslerp",
    "passthrough",
    "sce",
    "slerp",
    "task_arithmetic",
    "ties",
    "wudi",
]
