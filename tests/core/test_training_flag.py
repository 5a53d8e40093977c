"""Networks must have an argument for training; those without are refused, the others get it."""

import functools

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedcodist.core.from_haiku import from_haiku
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.from_nnx import from_flax_nnx
from fedcodist.models.exits import Exits, with_exits
from fedcodist.models.headed import headed
from fedcodist.models.multi_headed import multi_headed
from fedcodist.models.normalization import BatchNorm

pytestmark = pytest.mark.usefixtures("compile_quickly")

EXAMPLE = jnp.zeros((1, 4))
BATCH = {"image": jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)}


class Told(nn.Module):
    """A network with dropout and batch statistics, with a named argument for training."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        real = None if mask is None else mask[:, None] > 0
        x = nn.BatchNorm(use_running_average=not train)(x, mask=real)
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.Dense(50)(x)))


class ByPlace(Told):
    @nn.compact
    def __call__(self, x, train=False, mask=None):
        return Told.__call__(self, x, train=train, mask=mask)


class OtherName(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not training)(x))


class Options(nn.Module):
    @nn.compact
    def __call__(self, x, **options):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not options.get("train", False))(x))


class Attribute(nn.Module):
    deterministic: bool = True

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=self.deterministic)(x))


class AlwaysDrops(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


class OddAttribute(nn.Module):
    phase: str = "evaluation"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=self.phase == "evaluation")(x))


class Around(nn.Module):
    """A network that does not pass the training argument on to its part."""

    @nn.compact
    def __call__(self, x):
        return OtherName()(x)


class OwnStatistics(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(BatchNorm()(x, train=False))


class NeedsMore(nn.Module):
    @nn.compact
    def __call__(self, x, lengths):
        return nn.Dense(3)(x)


class NNXBase(nnx.Module):
    def __init__(self, rngs, flag=None):
        self.dropout, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
        if flag:
            setattr(self, flag, False)

    def __call__(self, x):
        return self.last(self.dropout(x))


class NNXTrain(NNXBase):
    def __call__(self, x, train=False):
        return self.last(self.dropout(x, deterministic=not train))


class NNXUnset(NNXBase):
    def __call__(self, x, deterministic=None):
        return self.last(self.dropout(x, deterministic=deterministic))


class NNXOtherName(NNXBase):
    def __call__(self, x, training=False):
        return self.last(self.dropout(x, deterministic=not training))


class NNXOptions(NNXBase):
    def __call__(self, x, **options):
        return self.last(self.dropout(x, deterministic=not options.get("train")))


class NNXAround(nnx.Module):
    def __init__(self, rngs):
        self.part = NNXTrain(rngs)

    def __call__(self, x):
        return self.part(x)


def haiku_told(x, is_training):
    x = hk.Linear(50)(x)
    return hk.Linear(3)(hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x)


def haiku_by_place(x, train, /):
    return haiku_told(x, train)


def haiku_other_name(x, training=False):
    return haiku_told(x, training)


def haiku_options(x, **options):
    return haiku_told(x, options.get("train", False))


class HaikuPart(hk.Module):
    def __call__(self, x, is_training=False):
        return haiku_told(x, is_training)


linen = lambda module: functools.partial(from_flax_linen, module, EXAMPLE)
of_nnx = lambda create, **options: functools.partial(
    from_flax_nnx, lambda rngs: create(rngs, **options), EXAMPLE
)
haiku = lambda network: functools.partial(from_haiku, network, EXAMPLE)

CANNOT_BE_TOLD = {
    "linen, another name": (linen(OtherName()), "OtherName has 'training'"),
    "linen, options": (linen(Options()), r"Options has \*\*options"),
    "linen, attribute": (linen(Attribute()), "Attribute has an attribute 'deterministic'"),
    "linen, odd attribute": (linen(OddAttribute()), "Dropout_0 of OddAttribute"),
    "linen, a part": (linen(Around()), "OtherName_0/Dropout_0 of Around"),
    "linen, statistics of a part": (linen(OwnStatistics()), "batch_stats of OwnStatistics"),
    "linen, always off": (
        linen(nn.Sequential([nn.Dropout(0.5, deterministic=True), nn.Dense(3)])),
        "layers_0 of Sequential",
    ),
    "linen, always on": (
        linen(nn.Sequential([nn.Dropout(0.5, deterministic=False), nn.Dense(3)])),
        "one layer is in the same mode",
    ),
    "linen with train, always on": (linen(AlwaysDrops()), "one layer is in the same mode"),
    "linen, statistics always on": (
        linen(nn.Sequential([nn.BatchNorm(use_running_average=False), nn.Dense(3)])),
        "one layer is in the same mode",
    ),
    "linen, remat of another name": (linen(nn.remat(OtherName)()), "has 'training'"),
    "linen, backbone": (lambda: multi_headed(OtherName(), EXAMPLE, 3), "OtherName has 'training'"),
    "nnx, another name": (of_nnx(NNXOtherName), "NNXOtherName has 'training'"),
    "nnx, options": (of_nnx(NNXOptions), r"NNXOptions has \*\*options"),
    "nnx, attribute": (of_nnx(NNXBase, flag="training"), "NNXBase has an attribute 'training'"),
    "nnx, a part": (of_nnx(NNXAround), "Dropout of NNXAround"),
    "haiku, another name": (haiku(haiku_other_name), "haiku_other_name has 'training'"),
    "haiku, partial": (
        haiku(functools.partial(haiku_other_name, training=True)),
        "haiku_other_name has 'training'",
    ),
    "haiku, options": (haiku(haiku_options), r"haiku_options has \*\*options"),
    "haiku, a part": (haiku(lambda x: HaikuPart()(x)), "haiku_part of <lambda>"),
    "haiku, always draws": (
        haiku(lambda x: hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(3)(x))),
        "and draw keys in training only, .*: evaluation has no key",
    ),
    "haiku with train, always draws": (
        haiku(lambda x, train: hk.dropout(hk.next_rng_key(), 0.5 * train, hk.Linear(3)(x))),
        "and draw keys in training only, .*: evaluation has no key",
    ),
}


@pytest.mark.parametrize("case", CANNOT_BE_TOLD)
def test_a_network_that_cannot_be_told_of_training_is_refused(case):
    make, says = CANNOT_BE_TOLD[case]
    with pytest.raises(ValueError, match=rf"must have a parameter `train` .*{says}") as error:
        make()
    assert "\n" not in str(error.value)


CAN_BE_TOLD = {
    "linen": linen(Told()),
    "linen by place": linen(ByPlace()),
    "linen remat": linen(nn.remat(Told)()),
    "linen remat by place": linen(nn.remat(ByPlace)()),
    "linen remat, static": linen(nn.remat(ByPlace, static_argnums=(2,))()),
    "linen jit, static": linen(nn.jit(Told, static_argnames=("train",))()),
    "nnx modes": of_nnx(NNXBase),
    "nnx, train": of_nnx(NNXTrain),
    "nnx, a flag that is not set": of_nnx(NNXUnset),
    "haiku": haiku(haiku_told),
    "haiku by place": haiku(haiku_by_place),
    "haiku, partial": haiku(functools.partial(haiku_told, is_training=False)),
}


@pytest.mark.parametrize("case", CAN_BE_TOLD)
def test_dropout_is_on_in_training_and_off_in_evaluation(case):
    model = CAN_BE_TOLD[case]()
    variables = model.init(jax.random.key(0))
    told = lambda train, key: np.asarray(
        model.apply(variables, BATCH, train=train, key=jax.random.key(key))[0]
    )
    assert np.abs(told(True, 1) - told(True, 2)).max() > 0.01
    np.testing.assert_array_equal(told(False, 1), told(False, 2))


@pytest.mark.parametrize("case", ["linen remat", "linen remat by place", "linen remat, static"])
def test_a_module_under_remat_is_the_module(case):
    """Parameters, outputs and statistics, which the mask reaches."""
    model, plain = CAN_BE_TOLD[case](), CAN_BE_TOLD["linen"]()
    variables = model.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, variables, plain.init(jax.random.key(0)))
    mask = jnp.array([1, 1, 1, 1, 0, 0], jnp.float32)
    step = lambda each: each.apply(variables, BATCH, train=True, key=jax.random.key(1), mask=mask)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        step(model)[1],
        step(plain)[1],
    )
    program = jax.make_jaxpr(lambda v: model.apply(v, BATCH, train=True, key=jax.random.key(1)))
    assert "remat" in str(program(variables)) or "checkpoint" in str(program(variables))


class TwoOutputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(x), x


OF_PARTS = {
    "headed": ("backbone", lambda part: headed(part, EXAMPLE, 3)),
    "headed, width": ("backbone", lambda part: headed(part, EXAMPLE, 3, width=2)),
    "multi_headed": ("backbone", lambda part: multi_headed(part, EXAMPLE, 3)),
    "with_exits": (
        r"module\.blocks\[1\]",
        lambda part: with_exits(Exits([nn.Dense(4), part], 3), EXAMPLE),
    ),
}
REFUSED_PARTS = {
    "remat": (nn.remat(ByPlace)(), r"must be without `nn.remat` .* does not reach \w+ByPlace"),
    "remat, static": (nn.remat(ByPlace, static_argnums=(2,))(), "must be without `nn.remat`"),
    "jit, static": (nn.jit(ByPlace, static_argnums=(2,))(), "must be without `nn.remat`"),
    "two outputs": (TwoOutputs(), r"must return an array \[batch, ...\], got a tuple of 2"),
    "class": (nn.Dense, r"must be a flax.linen.Module, such as Dense\(...\), got the class"),
    "function": (lambda x: x, "must be a flax.linen.Module, got <function"),
    "nnx": (nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "must be a flax.linen.Module, got Linear"),
}


@pytest.mark.parametrize("network", OF_PARTS)
@pytest.mark.parametrize("case", REFUSED_PARTS)
def test_a_part_that_cannot_be_called_is_refused_in_one_line(case, network):
    (name, make), (part, says) = OF_PARTS[network], REFUSED_PARTS[case]
    with pytest.raises((TypeError, ValueError), match=f"^{name} {says}") as error:
        make(part)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("network", OF_PARTS)
def test_parts_that_flax_transformed_are_taken_if_they_hear_of_training(network):
    make = OF_PARTS[network][1]
    make(nn.jit(Told, static_argnames=("train",))())
    make(nn.remat(nn.Dense)(5))


def test_the_error_of_a_part_itself_is_not_hidden():
    class Fails(Told):
        @nn.compact
        def __call__(self, x, train=False):
            raise RuntimeError("of the part")

    place = r"\(test_training_flag\.py, line \d+\)"
    message = f"^the network does not fit the example .* {place}: of the part$"
    with pytest.raises(ValueError, match=message) as error:
        headed(Fails(), EXAMPLE, 3)
    assert isinstance(error.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match=r"\(of the part\)"):
        headed(nn.remat(Fails)(), EXAMPLE, 3)


def test_a_module_that_nobody_can_call_is_refused():
    with pytest.raises(ValueError, match=r"called as NeedsMore\(inputs\).*'lengths'") as error:
        from_flax_linen(NeedsMore(), EXAMPLE)
    assert "\n" not in str(error.value)


def test_networks_without_dropout_need_no_flag():
    from_flax_linen(nn.Sequential([nn.Dense(5), nn.relu, nn.Dense(3)]), EXAMPLE)
    from_flax_linen(nn.Sequential([nn.Dropout(0.0, deterministic=True), nn.Dense(3)]), EXAMPLE)
    from_haiku(lambda x: hk.Sequential([hk.Linear(5), hk.Linear(3)])(x), EXAMPLE)
    from_flax_nnx(
        lambda rngs: nnx.Sequential(nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)),
        EXAMPLE,
    )
