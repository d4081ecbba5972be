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
    """`case_of("olmoe", sources=3, dtype=torch.bfloat16)`: built once; read it only."""
    built: dict[tuple[Any, ...], cases.Case] = {}

    def case(
        family: str,
        *,
        sources: int = 2,
        scale: float = 0.3,
        rows: int = 14,
        template: bool = False,
        **options: Any,
    ) -> cases.Case:
        shape = {"sources": sources, "scale": scale, "rows": rows, "template": template}
        key = (family, *sorted((k, repr(v)) for k, v in {**shape, **options}.items()))
        if key not in built:
            base = zoo_folder(family, **options)
            built[key] = cases.make_case(base, tmp_path_factory.mktemp(family), **shape)
        return built[key]

    return case
