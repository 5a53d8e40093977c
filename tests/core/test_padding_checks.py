"""Padding is never counted in batch statistics."""

import warnings
from collections.abc import Callable

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedcodist.algorithms.clients.fed_avg import fed_avg
from fedcodist.algorithms.clients.scaffold import full_gradient, scaffold
from fedcodist.algorithms.parties.fed_l2g import fed_l2g
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.local_only import local_only
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.from_haiku import from_haiku
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.from_nnx import from_flax_nnx
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.model import cross_entropy
from fedcodist.core.padding_checks import check_dealt_batches
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.digits import BatchNormMLP
from fedcodist.models.headed import headed
from fedcodist.run.experiment import Experiment, check_experiment, run_experiment
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

EXAMPLE = jnp.zeros((1, 1))
COLUMNS = {
    "image": np.array([[1.0], [2.0], [4.0], [8.0], [16.0], [3.0], [5.0], [7.0]], np.float32),
    "label": np.zeros(8, np.int32),
}


class Plain(nn.Module):
    """Batch normalisation without a mask, as it is usually written."""

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))


class Ignoring(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool, mask=None):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))


class PlainNNX(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.last = nnx.BatchNorm(1, rngs=rngs), nnx.Linear(1, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(x))


def plain_haiku(x, is_training):
    return hk.Linear(2)(hk.BatchNorm(True, True, 0.9)(x, is_training))


NETWORKS = {
    "linen": lambda: from_flax_linen(Plain(), EXAMPLE),
    "linen, mask ignored": lambda: from_flax_linen(Ignoring(), EXAMPLE),
    "nnx": lambda: from_flax_nnx(PlainNNX, EXAMPLE),
    "haiku": lambda: from_haiku(plain_haiku, EXAMPLE),
}


def experiment_of(model, offsets, batch_size=4, streamed=False, method=fed_avg):
    data = FederatedData.from_arrays(
        {name: column[: offsets[-1]] for name, column in COLUMNS.items()}, offsets=offsets
    )
    clients = np.arange(data.num_clients)
    pool = Pool(method(model, LocalTraining(batch_size=batch_size)), clients, 1)
    algorithm = independent_pools({"main": pool}, data.columns)
    source = StreamedData(data) if streamed else resident_data(data)
    return Experiment(algorithm, source, {"test": data}, 1)


@pytest.mark.parametrize("network", NETWORKS)
def test_statistics_that_would_count_padding_are_refused(network):
    model, streamed = NETWORKS[network](), network == "nnx"
    with pytest.raises(
        ValueError, match=r"Client 1 has 3 .*batch_size=4.*`mask\[:, None\] > 0`"
    ) as error:
        check_experiment(experiment_of(model, [0, 4, 7], streamed=streamed))
    assert "\n" not in str(error.value)
    # Here is no padding.
    check_experiment(experiment_of(model, [0, 4, 8], streamed=streamed))


class Masked(nn.Module):
    """Flax's normalisation with the mask as the refusal says."""

    @nn.compact
    def __call__(self, x, train=False, mask=None):
        mask = None if mask is None else mask[:, None] > 0
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x, mask=mask))


class MaskedNNX(PlainNNX):
    def __call__(self, x, mask=None):
        return self.last(self.norm(x, mask=None if mask is None else mask[:, None] > 0))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: from_flax_linen(BatchNormMLP((3,), 2), EXAMPLE), id="our layer"),
        pytest.param(lambda: from_flax_linen(Masked(), EXAMPLE), id="linen"),
        pytest.param(lambda: from_flax_nnx(MaskedNNX, EXAMPLE), id="nnx"),
    ],
)
def test_networks_that_leave_padding_out_are_taken(make):
    check_experiment(experiment_of(make(), [0, 4, 7]))


class Auxiliary(nn.Module):
    """Logits, and another output; `jit` hides from which inputs it is made."""

    other: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, x, mask=None):
        temperature = self.param("temperature", nn.initializers.ones, ())
        h = nn.Dense(5)(x)
        other = jax.jit(lambda *arrays: (self.other(*arrays, mask), arrays))(h, temperature)[0]
        return nn.Dense(2)(h), other


def auxiliary(other, is_read=True):
    def loss(outputs, batch):
        return cross_entropy(outputs[0], batch) + (outputs[1].mean() if is_read else 0.0)

    return from_flax_linen(Auxiliary(other), EXAMPLE, loss=loss, metrics={})


mean_of_batch = lambda h, temperature, mask: (h**2).mean()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_output_that_would_count_padding_is_refused(streamed):
    make = lambda offsets: experiment_of(auxiliary(mean_of_batch), offsets, streamed=streamed)
    message = r"^network must return an output .*`mask`: .*Client 1 has 3 .*batch_size=4"
    with pytest.raises(ValueError, match=message) as error:
        check_experiment(make([0, 4, 7]))
    assert "\n" not in str(error.value)
    check_experiment(make([0, 4, 8]))  # here is no padding


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: auxiliary(mean_of_batch, is_read=False), id="not read"),
        pytest.param(lambda: auxiliary(lambda h, t, mask: t), id="of parameters"),
        pytest.param(lambda: auxiliary(lambda h, t, mask: h.T), id="batch axis last"),
        pytest.param(
            lambda: auxiliary(
                lambda h, t, mask: jnp.sum(h.mean(1) * (1 if mask is None else mask))
            ),
            id="mask",
        ),
    ],
)
def test_outputs_that_leave_padding_out_are_taken(model):
    check_experiment(experiment_of(model(), [0, 4, 7]))


def test_a_clean_run_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experiment = experiment_of(NETWORKS["linen"](), [0, 4, 8])
        run_experiment(experiment, show_progress=False)


def client(size):
    size = np.int32(size) if isinstance(size, int) else size
    columns = {name: jnp.asarray(column) for name, column in COLUMNS.items()}
    return ClientData(columns, jnp.int32(0), size, size, 8, False)


def test_a_client_of_known_size_is_refused_and_one_of_unknown_size_warned_of():
    model, training = NETWORKS["linen"](), LocalTraining(batch_size=4)
    variables, key = model.init(jax.random.key(0)), jax.random.key(1)
    train = lambda size: train_client(model, training, variables, client(size), key, 0.1)
    with pytest.raises(ValueError, match="A client has 5 examples, which is not a multiple"):
        jax.eval_shape(lambda: train(5))
    with pytest.warns(UserWarning, match="Clients may have a number of examples") as found:
        jax.eval_shape(train, jnp.int32(8))
    assert "\n" not in str(found[0].message)


def test_the_full_gradient_of_scaffold_is_guarded_and_leaves_padding_out():
    training, key = LocalTraining(batch_size=4), jax.random.key(1)
    plain = NETWORKS["linen"]()
    variables = plain.init(jax.random.key(0))
    with pytest.raises(ValueError, match="A client has 5 examples"):
        jax.eval_shape(lambda: full_gradient(plain, training, variables, client(5), key))
    # In evaluation the running averages normalise, whatever the batch.
    jax.eval_shape(lambda: full_gradient(plain, training, variables, client(5), key, train=False))

    model = from_flax_linen(BatchNormMLP((3,), 2), EXAMPLE)
    start = model.init(jax.random.key(0))
    found = jax.jit(lambda: full_gradient(model, training, start, client(5), key))()

    def loss(params):
        total = 0.0
        for part in (slice(0, 4), slice(4, 5)):
            batch = {name: column[part] for name, column in COLUMNS.items()}
            outputs, _ = model.apply(start._replace(params=params), batch, train=True)
            total += jnp.sum(model.loss(outputs, batch))
        return total / 5

    expected = jax.jit(jax.grad(loss))(start.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_scaffold_of_both_options_is_refused():
    for option in (1, 2):
        make = lambda model, training, option=option: scaffold(model, 2, training, option)
        with pytest.raises(ValueError, match="Client 1 has 3 examples"):
            check_experiment(experiment_of(NETWORKS["linen"](), [0, 4, 7], method=make))


def test_parties_are_guarded_with_their_own_numbers_of_examples():
    """The first has full batches, and the network of the second has no statistics."""
    model, plain = NETWORKS["linen"](), from_flax_linen(nn.Dense(2), EXAMPLE)
    data = FederatedData.from_arrays({n: c[:7] for n, c in COLUMNS.items()}, offsets=[0, 4, 7])

    def experiment_of_parties(first, second):
        groups = {"a": PartyGroup(first, np.array([0])), "b": PartyGroup(second, np.array([1]))}
        algorithm = local_only(groups, LocalTraining(batch_size=4))
        return Experiment(algorithm, resident_data(data), {"test": data}, 1)

    check_experiment(experiment_of_parties(model, plain))
    with pytest.raises(ValueError, match="Client 1 has 3 examples, which is not a multiple"):
        check_experiment(experiment_of_parties(plain, model))


def test_fed_l2g_trains_without_its_quiz_examples():
    """Two of 6 examples are for the quiz, so that 4 fill a batch; of 8 there are 6 left."""
    network = headed(Ignoring(), EXAMPLE, 2)
    training = LocalTraining(batch_size=4)
    algorithm = fed_l2g({"a": PartyGroup(network, np.arange(1))}, 2, training, quiz_size=2)

    def check(examples):
        columns = {name: column[:examples] for name, column in COLUMNS.items()}
        data = FederatedData.from_arrays(columns, offsets=[0, examples])
        check_experiment(Experiment(algorithm, resident_data(data), {"test": data}, 1))

    check(6)
    with pytest.raises(ValueError, match="Client 0 trains on 6 examples, which is not a multiple"):
        check(8)


def test_batches_that_devices_share_are_guarded():
    """Three devices have two places each for a batch of four."""
    model = NETWORKS["linen"]()
    variables = model.init(jax.random.key(0))
    batch = {"image": jnp.zeros((2, 1))}
    check_dealt_batches(model.apply, variables, batch, batch_size=4, devices=2, axis_name=None)
    with pytest.raises(ValueError, match="3 devices share batches of 4"):
        check_dealt_batches(model.apply, variables, batch, batch_size=4, devices=3, axis_name=None)
