"""Stand-ins for training and distillation, to see what a method does around them without either."""

import jax
import jax.numpy as jnp

from fedcodist.algorithms.pools.fed_sdd import fed_sdd
from fedcodist.algorithms.pools.pool_rounds import TrainedPools
from fedcodist.core.inputs import ClientData, Inputs, Round


def loss_of_clients(monkeypatch, update, hyper):
    """(outputs, batch) -> losses [batch]: the loss with which a client update trains a network."""
    losses, module = [], update.__module__
    keep = lambda *_, loss_hook: losses.append(loss_hook)
    monkeypatch.setattr(f"{module}.train_client", keep)
    monkeypatch.setattr(f"{module}.client_result", lambda *_, **__: None)
    update(None, None, ClientData({}, 0, 2, 2, 2, False), None, hyper)
    (loss,) = losses
    return loss


def rounds_of_students(monkeypatch, build, algorithm):
    """(a state of zeros, round -> the state after it), where only distillation moves models.

    Groups have nothing to train, and students end 1 above their start.
    """
    monkeypatch.setattr(
        f"{build.__module__}.train_groups",
        lambda groups, models, *_, **__: (dict(models), TrainedPools({}, {}, {}, {}, {})),
    )
    monkeypatch.setattr(
        f"{fed_sdd.__module__}.distilled_students",
        lambda models, starts, *_, **__: {
            name: jax.tree.map(lambda w: w + 1, start) for name, start in starts.items()
        },
    )
    shapes, key = jax.eval_shape(algorithm.init, jax.random.key(0)), jax.random.key(0)
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def after(index):
        round = Round(jnp.int32(index), key, Inputs({}, {}))
        with jax.disable_jit():  # nothing is compiled
            return algorithm.round(start, dict.fromkeys(start.models), round, algorithm.hyper)[0]

    return start, after
