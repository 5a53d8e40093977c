"""A mean and its uncertainty as text, with two digits; shares are in points of per cent."""

import statistics
from collections.abc import Sequence

from fedcodist.report.intervals import student_half_width


def plus_minus(mean: float, half_width: float | None, is_difference: bool = False) -> str:
    """'33.86 ± 0.21', or for a difference '+0.52 ± 0.31'. None means that the uncertainty is unknown."""
    text = f"{mean:+.2f}" if is_difference else f"{mean:.2f}"
    return text if half_width is None else f"{text} ± {half_width:.2f}"


def mean_and_deviation(values: Sequence[float]) -> str:
    """The mean, with the sample standard deviation over the seeds where there are several."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return plus_minus(statistics.fmean(values), deviation)


def mean_difference(differences: Sequence[float]) -> str:
    """The mean, with its 95 % interval by Student's t where there are several differences."""
    mean, half_width = statistics.fmean(differences), student_half_width(differences)
    return plus_minus(mean, half_width, is_difference=True)
