"""A mean and its uncertainty as text; shares are in points of per cent, with two decimals."""

import math
import statistics
from collections.abc import Sequence

from fedcodist.report.intervals import student_half_width

# A number that needs more decimals than these is written as '3.1e-09'.
_MOST_DECIMALS = 6


def plus_minus(
    mean: float, half_width: float | None, is_difference: bool = False, is_share: bool = True
) -> str:
    """'33.86 ± 0.21', or for a difference '+0.52 ± 0.31'.

    Args:
      mean: in points of per cent, or of a metric that is no share.
      half_width: the uncertainty; None if it is unknown.
      is_difference: whether to write the sign.
      is_share: if not, there are as many more decimals as keep two digits of the uncertainty, or of the
        mean: a loss may be 0.0031.
    """
    style = ".2f" if is_share else _style(mean, half_width or 0.0)
    text = f"{mean:+{style}}" if is_difference else f"{mean:{style}}"
    return text if half_width is None else f"{text} ± {half_width:{style}}"


def mean_and_deviation(values: Sequence[float], is_share: bool = True) -> str:
    """The mean, with the sample standard deviation over the seeds where there are several."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return plus_minus(statistics.fmean(values), deviation, is_share=is_share)


def mean_difference(differences: Sequence[float]) -> str:
    """The mean, with its 95 % interval by Student's t where there are several differences."""
    mean, half_width = statistics.fmean(differences), student_half_width(differences)
    return plus_minus(mean, half_width, is_difference=True)


def _style(mean: float, half_width: float) -> str:
    """How the two numbers are written, as in an f-string."""
    if _decimals(max(abs(mean), half_width)) > _MOST_DECIMALS:
        return ".1e"
    return f".{min(max(2, _decimals(half_width or mean)), _MOST_DECIMALS)}f"


def _decimals(value: float) -> int:
    """How many decimals show two digits of a number."""
    return 1 - math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
