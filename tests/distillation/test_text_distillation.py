"""Codistillation of language models: logits in chunks, the mean over tokens, any number of devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from fedcodist.algorithms.pools.codistillation import codistillation_target
from fedcodist.core import readout
from fedcodist.core.inputs import Examples
from fedcodist.core.model import Variables
from fedcodist.data.vocabulary import BOS, EOS, PAD
from fedcodist.distillation.divergences import kl_divergence
from fedcodist.distillation.loop import distill, frozen
from fedcodist.distillation.settings import Distillation
from fedcodist.run.placement import AXIS, all_devices
from fedcodist.text import lstm
from fedcodist.text.lstm import LSTMLanguageModel
from fedcodist.text.next_token import language_model, next_tokens
from fedcodist.text.transformer import Transformer
from tests.core.test_readout import all_shapes

VOCABULARY, LENGTH = 12, 5
MODELS = {
    "small": language_model(LSTMLanguageModel(VOCABULARY, 4, 3, 1), VOCABULARY),
    "large": language_model(Transformer(VOCABULARY, 8, 2, 1), VOCABULARY),
}
SETTINGS = Distillation(
    2,
    batch_size=6,
    optimizer=optax.sgd,
    mixup_beta=0.0,
    preprocess=next_tokens,
    inputs="tokens",
)


def rows():
    rng = np.random.default_rng(0)
    tokens = np.full((20, LENGTH + 1), PAD, np.uint16)
    for row in tokens:
        whole = [BOS, *rng.integers(3, VOCABULARY, rng.integers(1, 7)), EOS][: LENGTH + 1]
        row[: len(whole)] = whole
    indices = np.arange(2 * SETTINGS.batch_size).reshape(2, -1)
    return Examples({"tokens": jnp.asarray(tokens)}, jnp.asarray(indices, jnp.int32))


def starts():
    return {name: model.init(jax.random.key(i)) for i, (name, model) in enumerate(MODELS.items())}


def target(student, logits):
    (other,) = set(MODELS) - {student}
    return codistillation_target(
        {other: logits[other]}, {other: 0.5}, {other: 1.0}, logits[student], 0.2
    )


def distilled(settings=SETTINGS, axis_name=None):
    students = starts()
    return distill(
        MODELS,
        students,
        {name: frozen(model, students[name]) for name, model in MODELS.items()},
        target,
        rows(),
        jax.random.key(0),
        dict.fromkeys(MODELS, 0.5),
        settings,
        axis_name,
    )


def reference():
    """All logits of the batch at once, and the mean over tokens that are predicted."""
    students, data = starts(), rows()

    def logits_of(name, params, batch):
        outputs = MODELS[name].apply(Variables(params, {}), batch)[0]
        return outputs.features @ outputs.kernel + outputs.bias

    params, losses = {name: values.params for name, values in students.items()}, []
    for indices in data.indices:
        batch = next_tokens({"tokens": data.columns["tokens"][indices]}, None, None)
        counts = batch["label"] != PAD
        logits = {name: logits_of(name, students[name].params, batch) for name in MODELS}

        def loss(own, name, batch=batch, counts=counts, logits=logits):
            divergence = kl_divergence("forward")(logits_of(name, own, batch), target(name, logits))
            return jnp.sum(divergence * counts) / jnp.sum(counts)

        found = {name: jax.value_and_grad(loss)(params[name], name) for name in MODELS}
        losses.append({name: value for name, (value, _) in found.items()})
        params = {
            name: jax.tree.map(lambda p, g: p - 0.5 * g, params[name], gradient)
            for name, (_, gradient) in found.items()
        }
    return params, losses


def assert_close(left, right):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)


def test_equals_the_mean_over_tokens_of_all_logits():
    found = jax.jit(distilled)()
    params, losses = jax.jit(reference)()
    assert_close({name: values.params for name, values in found.students.items()}, params)
    assert_close([found.first_loss, found.last_loss], losses)


def test_no_logits_of_a_batch_exist():
    words = lstm.VOCABULARY
    models = {
        "small": language_model(lstm.small_lstm(), words),
        "large": language_model(lstm.large_lstm(), words),
    }
    tokens = {"tokens": jnp.full((64, 21), 5, jnp.uint16)}
    batches = Examples(tokens, jnp.zeros((2, 64), jnp.int32))

    def distilled(key):
        students = {name: model.init(key) for name, model in models.items()}
        teachers = {name: frozen(model, students[name]) for name, model in models.items()}
        rates, settings = dict.fromkeys(models, 0.5), SETTINGS._replace(batch_size=64)
        return distill(models, students, teachers, target, batches, key, rates, settings)

    program = jax.make_jaxpr(distilled)(jax.random.key(0))
    shapes = {shape for shape in all_shapes(program.jaxpr) if shape[-1:] == (words,)}
    assert max(math.prod(shape[:-1]) for shape in shapes) == readout.CHUNK < 64 * 20


@pytest.mark.slow
def test_devices_share_the_batch():
    mesh = all_devices()
    dealt = jax.shard_map(
        functools.partial(distilled, axis_name=AXIS),
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    assert_close(jax.jit(dealt)(), jax.jit(distilled)())


@pytest.mark.slow
def test_tokens_cannot_be_mixed():
    with pytest.raises(ValueError, match=r"mixup_beta must be 0 for 'tokens', which are int32"):
        distilled(SETTINGS._replace(mixup_beta=2.0))
