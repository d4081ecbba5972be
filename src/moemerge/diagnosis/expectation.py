"""What to expect of a repair: the share of the gap to the sources that it closed elsewhere.

The KL of the routing tells merges in which routers matter from others. Nothing measured predicts
what refit closes. `evidence/prediction.py` fits the numbers and tests them on other models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Expected:
    """The mean over merges of synthetic specialists, and the range of four fifths of them."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:.0%} ({self.low:.0%} to {self.high:.0%})"


# By the routing KL below which a band lies.
CALIBRATION: Final = {
    0.15: Expected(0.04, -0.02, 0.11),
    0.3: Expected(0.15, -0.05, 0.52),
    0.5: Expected(0.26, -0.06, 0.63),
    math.inf: Expected(0.55, 0.39, 0.78),
}
REFIT: Final = Expected(0.77, 0.60, 0.90)  # in closed form


def expected_of_calibration(kl: float) -> Expected:
    """Return what `calibrate` closed in merges with such a routing KL, which may be infinite."""
    bands = (expected for below, expected in CALIBRATION.items() if kl < below)
    return next(bands, CALIBRATION[math.inf])
