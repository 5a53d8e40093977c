"""Mutable state of students that are distilled over several devices."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Examples
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.distillation.loop import distill, frozen
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.weight_averaging import WeightAveraging, distill_averaged
from fedcodist.models.headed import headed
from fedcodist.models.normalization import BatchNorm


class StockBatchNorm(nn.Module):
    """A network whose statistics are not synchronised over the axis of its batch."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))


class Normalised(nn.Module):
    """A part of a network, whose statistics are synchronised."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train=False, mask=None):
        return BatchNorm(axis_name=self.axis_name)(nn.Dense(5)(x), train=train, mask=mask)


class Around(nn.Module):
    """A network that holds its parts and does not know of their axis."""

    parts: tuple[nn.Module, ...]

    @nn.compact
    def __call__(self, x, train=False, mask=None):
        for part in self.parts:
            x = part(x, train=train, mask=mask)
        return nn.Dense(3)(x)


def distilled(model, devices):
    """A student after two steps, whose batches several devices share."""
    images = jax.random.normal(jax.random.key(1), (8, 4)) * jnp.arange(1, 9)[:, None]
    trained = functools.partial(
        distill,
        {"student": model},
        {"student": model.init(jax.random.key(0))},
        {"teacher": frozen(model, model.init(jax.random.key(5)))},
        lambda name, outputs: jax.nn.softmax(outputs["teacher"]),
        Examples({"image": images}, jnp.arange(16).reshape(2, 8) % 8),
        jax.random.key(2),
        {"student": 0.1},
        Distillation(steps=2, batch_size=8, mixup_beta=0, optimizer=optax.sgd),
    )
    if devices == 1:
        return trained().students["student"]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("clients",))
    shared = functools.partial(trained, axis_name="clients")
    on_each = jax.shard_map(
        shared, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(on_each)().students["student"]


@pytest.mark.parametrize(
    "make",
    [
        lambda example: from_flax_linen(Around((Normalised(), Normalised())), example),
        lambda example: headed(Normalised(), example, 3),
    ],
    ids=["parts", "headed"],
)
def test_networks_that_hold_others_synchronise_their_statistics(make, recwarn):
    """The axis reaches the modules in a network's attributes."""
    model = make(jnp.zeros((1, 4)))
    together, alone = (distilled(model, devices) for devices in (2, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), together, alone
    )
    assert not [str(warning.message) for warning in recwarn if "axis_name" in str(warning.message)]


def test_statistics_of_each_devices_part_are_warned_of():
    """Another number of devices gives another model, and by default each core is one."""
    model = from_flax_linen(StockBatchNorm(), jnp.zeros((1, 4)))
    with pytest.warns(
        UserWarning, match=r"^network should use `axis_name`: .* each of 2 devices has"
    ):
        together = distilled(model, 2)
    alone = distilled(model, 1)
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), together.params, alone.params)
    assert max(jax.tree.leaves(gaps)) > 1e-3


@pytest.mark.filterwarnings("ignore:network should use `axis_name`")
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
