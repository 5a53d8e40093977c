"""How much a compressed file, or a part of one, may unpack to."""

from __future__ import annotations

from typing import Any

# Text and images are about ten times larger when unpacked, data made to fill a disk a thousand times.
_LARGEST_RATIO = 200
_ALWAYS_ALLOWED = 1 << 26  # small data may have any ratio


def largest_unpacked(size: int) -> int:
    """The most bytes that `size` compressed bytes may unpack to: 64 MiB, and 200 for each of them."""
    return _ALWAYS_ALLOWED + _LARGEST_RATIO * size


def check_unpacked(name: Any, unpacked: int, size: int) -> None:
    """Raises ValueError that names what unpacks to more bytes than `largest_unpacked(size)`."""
    if unpacked > (largest := largest_unpacked(size)):
        raise ValueError(f"{name} unpacks from {size:,} to more than {largest:,} bytes: refused")
