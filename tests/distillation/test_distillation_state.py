"""Mutable state of students that are distilled over several devices."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from fedcodist.core.inputs import Examples
from fedcodist.core.model import Model, Variables, cross_entropy, from_flax_linen
from fedcodist.distillation.loop import distill, frozen
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.weight_averaging import WeightAveraging, distill_averaged


class StockBatchNorm(nn.Module):
    """A network whose statistics are not synchronised over the axis of its batch."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))


def test_statistics_that_are_not_synchronised_are_the_same_on_every_device():
    model = from_flax_linen(StockBatchNorm(), jnp.zeros((1, 4)))
    student = model.init(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (8, 4))
    rows = Examples({"image": images}, jnp.arange(8)[None])
    settings = Distillation(steps=1, batch_size=8, mixup_beta=0)
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("clients"),
        check_vma=False,
    )
    def means(student):
        start = {"student": student}
        target = lambda name, outputs: jax.nn.softmax(outputs[name])
        done = distill(
            {"student": model},
            start,
            {"student": frozen(model, student)},
            target,
            rows,
            jax.random.key(2),
            {"student": 0.1},
            settings,
            "clients",
        )
        return done.students["student"].mutable["batch_stats"]["BatchNorm_0"]["mean"][None]

    on_devices = np.asarray(means(student))
    np.testing.assert_array_equal(on_devices[0], on_devices[1])
    # The mean of the halves' means is the batch's mean; momentum 0.99 keeps a hundredth of it.
    np.testing.assert_allclose(on_devices[0], 0.01 * images.mean(0), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "train", [distill, functools.partial(distill_averaged, WeightAveraging(1, 1), 8)]
)
def test_devices_draw_their_own_dropout(train):
    def drawing(variables, batch, *, train=False, key=None, mask=None, axis_name=None):
        mutable = variables.mutable
        if train:
            draw = jax.random.uniform(key)
            mutable = {"gap": jnp.ptp(jax.lax.all_gather(draw, axis_name))}
        return batch["image"] @ variables.params, mutable

    start = Variables(jnp.ones((4, 3)), {"gap": jnp.zeros(())})
    model = Model(lambda key: start, drawing, cross_entropy, {}, 3)
    trained = functools.partial(
        train,
        models={"student": model},
        students={"student": start},
        teachers={"student": frozen(model, start)},
        targets=lambda name, outputs: jax.nn.softmax(outputs[name]),
        unlabelled=Examples({"image": jnp.ones((8, 4))}, jnp.arange(8)[None]),
        key=jax.random.key(2),
        learning_rates={"student": 0.1},
        settings=Distillation(steps=1, batch_size=8, mixup_beta=0),
        axis_name="clients",
    )
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    on_each = jax.shard_map(
        trained, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False
    )
    # Averaged weights have statistics of passes of their own, after the steps.
    assert jax.jit(on_each)().students["student"].mutable["gap"] > 0.01
