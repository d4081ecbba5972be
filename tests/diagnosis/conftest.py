from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibration import cases


@pytest.fixture(scope="session")
def case_of(
    zoo_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., cases.Case]:
    """`case_of("olmoe", scale=0.1)`: fine-tunes, their average and text; built once, read only."""
    built: dict[str, cases.Case] = {}

    def case(family: str, *, sources: int = 2, scale: float = 0.3, **options: Any) -> cases.Case:
        key = repr((family, sources, scale, sorted(options.items(), key=str)))
        if key not in built:
            base = zoo_folder(family, **options)
            folder = tmp_path_factory.mktemp(f"diagnose-{family}")
            built[key] = cases.make_case(base, folder, sources=sources, scale=scale)
        return built[key]

    return case
