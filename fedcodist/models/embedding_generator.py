"""FedGen's generator: embeddings of a label, made of noise.

Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", 2021,
https://arxiv.org/abs/2105.10056.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class EmbeddingGenerator(nn.Module):
    """Noise and a one-hot label, a hidden layer of rectified units, an embedding.

    Attributes:
      classes: number of labels.
      hidden: units of the hidden layer.
      width: of the embeddings.
    """

    classes: int
    hidden: int
    width: int

    @nn.compact
    def __call__(self, labels: jax.Array, noise: jax.Array) -> jax.Array:
        """Embeddings [batch, width] of labels [batch] and noise [batch, noise]."""
        of_type = jnp.result_type(float)
        x = jnp.concatenate([noise, jax.nn.one_hot(labels, self.classes)], axis=-1)
        x = nn.relu(nn.Dense(self.hidden, param_dtype=of_type)(x))
        return nn.Dense(self.width, param_dtype=of_type)(x)


def diversity(noise: jax.Array, embeddings: jax.Array) -> jax.Array:
    """exp(-mean over pairs of |noise_i - noise_j|^2 |z_i - z_j|), scalar.

    It is small if different noise gives different embeddings. The distances are means over coordinates,
    of squares for noise and of absolute values for embeddings, as in the authors' code.

    Args:
      noise: [batch, noise]; embeddings: [batch, width].
    """
    noise_distances = jnp.mean((noise[:, None] - noise[None]) ** 2, axis=-1)
    distances = jnp.mean(jnp.abs(embeddings[:, None] - embeddings[None]), axis=-1)
    return jnp.exp(-jnp.mean(noise_distances * distances))
