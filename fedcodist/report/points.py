"""Thins the points of a curve."""

from collections.abc import Sequence
from typing import Any

MOST_POINTS = 61  # every 25 of 1,500 rounds, the codistillations among them


def thin(points: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """At most `most` (at least 2) of the points, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
