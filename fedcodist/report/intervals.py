"""95 % intervals of differences between mean accuracies in %."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

WELCH, PAIRED, ONE_SEED = "Welch", "paired", "one seed"


class Estimate(NamedTuple):
    """A difference in points; its 95 % interval is `value` ± `half_width`, computed by `kind`."""

    value: float
    half_width: float
    kind: str


def contrast(
    plus: Sequence[Sequence[float]],
    minus: Sequence[Sequence[float]],
    test_images: int,
    seeds_deviation: float = 0.0,
) -> Estimate:
    """The sum of the means of `plus` minus that of `minus`; all samples over seeds are independent.

    If every sample has at least two seeds, the interval is Welch's: Student's t with the degrees of
    freedom of Satterthwaite (Biometrics Bulletin 2, 1946). If a sample has one seed, the spread over
    seeds must come from other runs. The interval is then 1.96 standard errors; the variance of a mean is
    that of a binomial on `test_images` images, and of `seeds_deviation` by the sample's seeds.

    Args:
      plus: samples whose means are added, each with an accuracy in % per seed.
      minus: samples whose means are subtracted.
      test_images: how many images an accuracy was measured on.
      seeds_deviation: the standard deviation over seeds in comparable runs, in points; 0 if unknown.
    """
    samples = [*plus, *minus]
    means = [statistics.fmean(sample) for sample in samples]
    value = sum(means[: len(plus)]) - sum(means[len(plus) :])
    if min(map(len, samples)) < 2:
        variances = [
            mean * (100 - mean) / test_images + seeds_deviation**2 / len(sample)
            for mean, sample in zip(means, samples, strict=True)
        ]
        return Estimate(value, 1.96 * math.sqrt(sum(variances)), ONE_SEED)
    variances = [statistics.variance(sample) / len(sample) for sample in samples]
    if not sum(variances):
        return Estimate(value, 0.0, WELCH)
    # SciPy comes with JAX; it is slow to import.
    from scipy.stats import t

    pieces = zip(variances, samples, strict=True)
    freedom = sum(variances) ** 2 / sum(v**2 / (len(s) - 1) for v, s in pieces)
    return Estimate(value, float(t.ppf(0.975, freedom)) * math.sqrt(sum(variances)), WELCH)


def paired(
    plus: Sequence[float],
    minus: Sequence[float],
    test_images: int,
    seeds_deviation: float = 0.0,
) -> Estimate:
    """The mean difference of two runs with the same seeds in the same order.

    A seed determines initial weights, cohorts and batches of both runs. The interval is by Student's t
    over the seeds' differences; for one seed it is that of `contrast`.
    """
    differences = [a - b for a, b in zip(plus, minus, strict=True)]
    half_width = student_half_width(differences)
    if half_width is None:
        return contrast([plus], [minus], test_images, seeds_deviation)
    return Estimate(statistics.fmean(differences), half_width, PAIRED)


def student_half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean by Student's t; None for one value."""
    if len(values) < 2:
        return None
    # SciPy comes with JAX; it is slow to import.
    from scipy.stats import t

    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(t.ppf(0.975, len(values) - 1)) * error
