"""How far a difference of mean accuracies may be off: 95 % intervals, accuracies in %."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

WELCH, BINOMIAL = "Welch", "binomial"


class Estimate(NamedTuple):
    """A difference in points; it lies within ± `half_width` of `value` at 95 %, by `kind`."""

    value: float
    half_width: float
    kind: str


def contrast(
    plus: Sequence[Sequence[float]], minus: Sequence[Sequence[float]], test_images: int
) -> Estimate:
    """The sum of the means of `plus` less those of `minus`, each an independent sample over seeds.

    With at least two seeds in every sample the interval is Welch's: Student's t with the degrees of
    freedom of Satterthwaite (Biometrics Bulletin 2, 1946). Where a sample has one seed, nothing is
    known of the spread over seeds, and the interval is 1.96 binomial standard errors of a
    difference of accuracies, each measured on `test_images` images.
    """
    samples = [*plus, *minus]
    means = [statistics.fmean(sample) for sample in samples]
    value = sum(means[: len(plus)]) - sum(means[len(plus) :])
    if min(map(len, samples)) < 2:
        variances = [mean * (100 - mean) / test_images for mean in means]
        return Estimate(value, 1.96 * math.sqrt(sum(variances)), BINOMIAL)
    variances = [statistics.variance(sample) / len(sample) for sample in samples]
    if not sum(variances):
        return Estimate(value, 0.0, WELCH)
    # SciPy comes with JAX; it is slow to import.
    from scipy.stats import t

    pieces = zip(variances, samples, strict=True)
    freedom = sum(variances) ** 2 / sum(v**2 / (len(s) - 1) for v, s in pieces)
    return Estimate(value, float(t.ppf(0.975, freedom)) * math.sqrt(sum(variances)), WELCH)
