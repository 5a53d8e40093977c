"""Cross-entropy among a few drawn classes, an estimate of that among all classes of a `Readout`."""

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.readout import Readout, logits_of


def draw_classes(key: jax.Array, samples: int, by_frequency: np.ndarray) -> jax.Array:
    """Draws classes with replacement: the k-th most frequent has a weight of log((k + 1) / k).

    This log-uniform distribution is close to the frequencies of words in a text.

    Args:
      key: a JAX random key.
      samples: number of draws.
      by_frequency: int [classes], the most frequent class first.

    Returns:
      int32 [samples].
    """
    uniform = jax.random.uniform(key, (samples,))
    ranks = jnp.exp(uniform * np.log(len(by_frequency) + 1)) - 1
    ranks = jnp.minimum(ranks.astype(jnp.int32), len(by_frequency) - 1)
    return jnp.asarray(by_frequency, jnp.int32)[ranks]


def sampled_cross_entropy(
    readout: Readout, labels: jax.Array, by_frequency: np.ndarray
) -> jax.Array:
    """Cross-entropy among the label and `readout.samples`, 0 where `readout.weights` is 0.

    Sampled softmax (Jean et al. 2015, https://arxiv.org/abs/1412.2007) subtracts from every sample's
    logit the logarithm of its class's expected number of samples. The sum over samples then estimates
    the sum over all classes but the label. The label is always in the sum, and exactly once. So its
    logit is not corrected (Blanc and Rendle 2018, https://arxiv.org/abs/1712.00527), and samples that
    are the label are left out.

    Args:
      readout: of positions [...], with samples.
      labels: int [...].
      by_frequency: as given to `draw_classes`.

    Returns:
      float [...].

    Raises:
      ValueError: names `readout.samples` if there are none.
    """
    samples = readout.samples
    if samples is None:
        raise ValueError("readout.samples must be classes from draw_classes, got None.")
    expected = _log_expected(len(samples), by_frequency)
    label_logits = jnp.einsum("...e,e...->...", readout.features, readout.kernel[:, labels])
    label_logits += readout.bias[labels]
    others = logits_of(readout.features, readout.kernel[:, samples], readout.bias[samples])
    others -= expected[samples]
    others = jnp.where(samples == labels[..., None], -jnp.inf, others)
    all_logits = jnp.concatenate([label_logits[..., None], others], axis=-1)
    return (jax.nn.logsumexp(all_logits, axis=-1) - label_logits) * readout.weights


def _log_expected(samples: int, by_frequency: np.ndarray) -> jax.Array:
    """The logarithm of how often each class is expected among the samples, float32 [classes]."""
    ranks = np.argsort(by_frequency)
    probability = np.log1p(1 / (ranks + 1)) / np.log(len(ranks) + 1)
    return jnp.asarray(np.log(samples * probability), jnp.float32)
