"""Properties that follow from a metric's name: whether less is better, and whether it is shown in %.

Undefined values, such as precision without a prediction, are NaN, and a dash in tables.
"""

import math
import re

# Words of names such as `loss`, `hidden_distance` or `accuracy_head_3`.
_LOWER_IS_BETTER = (
    *(
        "loss",
        "perplexity",
        "error",
        "distance",
        "divergence",
        "entropy",
        "deviation",
        "variance",
        "std",
    ),
    *("epsilon", "nll", "kl", "mse", "rmse", "mae", "mape", "smape", "ece", "brier", "crps", "bce"),
    *("wer", "cer", "regret", "residual", "bytes", "seconds", "flops"),
    *("rmsle", "msle", "mase", "wape", "huber", "hinge", "fpr", "eer"),
    *("logloss", "crossentropy", "ppl", "bpc", "bpb", "misclassification"),
)
# Neighbouring words, which say something else without each other: likelihoods are better if higher.
_LOWER_IS_BETTER_TOGETHER = ("negative_log_likelihood", "false_positive", "false_negative")
_SHARES = ("accuracy", "precision", "recall", "score", "f1", "auc", "mrr", "ndcg")
# Words that say of what a share is, as in `cost_accuracy` and `hamming_score`; alone they are losses.
_LOWER_IS_BETTER_ALONE = ("cost", "hamming")


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a metric are better."""
    words = _words(metric)
    has = lambda known: any(word in words for word in known)
    if has(_LOWER_IS_BETTER) or (has(_LOWER_IS_BETTER_ALONE) and not has(_SHARES)):
        return True
    name = "_".join(re.findall(r"[a-z0-9]+", metric.lower()))
    return any(f"_{together}" in f"_{name}" for together in _LOWER_IS_BETTER_TOGETHER)


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 and is shown in per cent."""
    return not lower_is_better(metric) and any(word in _words(metric) for word in _SHARES)


def decimal(value: float, digits: int = 1) -> str:
    """A number in a table; a dash where it is undefined."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _words(metric: str) -> list[str]:
    words = re.split(r"[^a-z0-9]+", metric.lower())
    return [*words, *(word.removesuffix(ending) for word in words for ending in ("s", "es"))]
