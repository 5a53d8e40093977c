"""A module whose dropout is never on, since its training mode has no parameter `train`."""

import flax.linen as nn


class NeverInTraining(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        return nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(4)(x.reshape(len(x), -1)))


REFUSAL = "must have a parameter `train`"
