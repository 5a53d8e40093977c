"""Pictures of PIL as arrays, without importing PIL."""

from __future__ import annotations

from typing import Any

import numpy as np

# A palette's indices, pixels of one bit and inks are no colours of light.
_CONVERTED = {"1": "L", "P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB"}


def is_picture(value: Any) -> bool:
    return hasattr(value, "mode") and hasattr(value, "convert")


def pixels(picture: Any) -> np.ndarray:
    """The colours of a picture, `[height, width]` or `[height, width, channels]`, mostly uint8."""
    colours = _CONVERTED.get(picture.mode)
    return np.asarray(picture if colours is None else picture.convert(colours))
