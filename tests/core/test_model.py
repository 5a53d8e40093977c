"""One network written in Flax linen, Flax NNX and Haiku is one model."""

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from fedcodist.core.from_haiku import from_haiku
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.from_nnx import from_flax_nnx
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Variables
from fedcodist.core.trees import parameter_count

pytestmark = pytest.mark.usefixtures("compile_quickly")

FEATURES, HIDDEN, CLASSES, BATCH = 4, 5, 3, 6
LIBRARIES = ("linen", "nnx", "haiku")
GENERATOR = np.random.default_rng(0)
BATCHES = {
    "image": jnp.asarray(GENERATOR.normal(size=(BATCH, FEATURES)), jnp.float32),
    "label": jnp.asarray(GENERATOR.integers(0, CLASSES, BATCH), jnp.int32),
}
MASK = jnp.array([1, 1, 1, 1, 0, 0], jnp.float32)
EXAMPLE = jnp.zeros((1, FEATURES))


def normalise(x, mean, var, train, mask, axis_name):
    """Batch normalisation without scale; returns outputs and new running averages."""
    if not train:
        return (x - mean) * jax.lax.rsqrt(var + 1e-5), mean, var
    weights = (jnp.ones(len(x)) if mask is None else mask)[:, None]
    total = lambda value: value if axis_name is None else jax.lax.psum(value, axis_name)
    count = total(jnp.sum(weights))
    batch_mean = total(jnp.sum(x * weights, axis=0)) / count
    batch_var = total(jnp.sum(weights * (x - batch_mean) ** 2, axis=0)) / count
    outputs = (x - batch_mean) * jax.lax.rsqrt(batch_var + 1e-5)
    return outputs, 0.9 * mean + 0.1 * batch_mean, 0.9 * var + 0.1 * batch_var


class Linen(nn.Module):
    batch_norm: bool
    dropout: float = 0.0
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        x = nn.Dense(HIDDEN, name="first")(x)
        if self.batch_norm:
            mean = self.variable("batch_stats", "mean", jnp.zeros, HIDDEN)
            var = self.variable("batch_stats", "var", jnp.ones, HIDDEN)
            x, new_mean, new_var = normalise(x, mean.value, var.value, train, mask, self.axis_name)
            if train and not self.is_initializing():
                mean.value, var.value = new_mean, new_var
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES, name="second")(x)


class Statistic(nnx.Variable):
    """Running averages."""


class NNX(nnx.Module):
    def __init__(self, batch_norm, dropout, rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)
        if batch_norm:
            self.mean = Statistic(jnp.zeros(HIDDEN))
            self.var = Statistic(jnp.ones(HIDDEN))

    def __call__(self, x, *, mask=None, axis_name=None):
        x = self.first(x)
        if hasattr(self, "mean"):
            training = not self.dropout.deterministic
            x, self.mean[...], self.var[...] = normalise(
                x, self.mean[...], self.var[...], training, mask, axis_name
            )
        return self.second(self.dropout(nnx.relu(x)))


def haiku_network(batch_norm, dropout):
    def network(x, is_training, mask, axis_name):
        x = hk.Linear(HIDDEN, name="first")(x)
        if batch_norm:
            mean = hk.get_state("mean", (HIDDEN,), init=jnp.zeros)
            var = hk.get_state("var", (HIDDEN,), init=jnp.ones)
            x, new_mean, new_var = normalise(x, mean, var, is_training, mask, axis_name)
            if not hk.running_init():
                hk.set_state("mean", new_mean)
                hk.set_state("var", new_var)
        x = jax.nn.relu(x)
        if is_training and dropout:
            x = hk.dropout(hk.next_rng_key(), dropout, x)
        return hk.Linear(CLASSES, name="second")(x)

    return network


@functools.cache
def model(library, batch_norm=True, dropout=0.0):
    if library == "linen":
        return from_flax_linen(Linen(batch_norm, dropout), EXAMPLE)
    if library == "nnx":
        return from_flax_nnx(lambda rngs: NNX(batch_norm, dropout, rngs), EXAMPLE)
    return from_haiku(haiku_network(batch_norm, dropout), EXAMPLE)


def to_linen(library, variables):
    """The same values under linen's names, statistics without their collection."""
    params, mutable = variables
    if library == "haiku":
        params = {
            layer: {"kernel": values["w"], "bias": values["b"]} for layer, values in params.items()
        }
        return params, dict(next(iter(mutable.values()), {}))
    return params, dict(mutable.get("batch_stats", {})) if library == "linen" else dict(mutable)


def from_linen(library, variables):
    params, mutable = variables
    if library == "linen":
        return variables
    if library == "nnx":
        return Variables(params, dict(mutable.get("batch_stats", {})))
    params = {layer: {"w": v["kernel"], "b": v["bias"]} for layer, v in params.items()}
    return Variables(params, {"~": dict(mutable["batch_stats"])} if mutable else {})


@functools.cache
def weights(batch_norm):
    """Weights in linen's names with biases and statistics that are not zero."""
    variables = model("linen", batch_norm).init(jax.random.key(0))
    leaves, structure = jax.tree.flatten(variables)
    generator = np.random.default_rng(1)
    random = [jnp.asarray(generator.uniform(0.3, 1.5, leaf.shape), jnp.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, random)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected
    )


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_variables_have_the_same_shapes_in_all_libraries(library, batch_norm):
    variables = model(library, batch_norm).init(jax.random.key(1))
    same = from_linen(library, weights(batch_norm))
    assert jax.tree.structure(variables) == jax.tree.structure(same)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, same)
    assert parameter_count(variables.params) == (FEATURES + 1) * HIDDEN + (HIDDEN + 1) * CLASSES
    other = model(library, batch_norm).init(jax.random.key(2))
    kernels = [to_linen(library, each)[0]["first"]["kernel"] for each in (variables, other)]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.01


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_number_of_classes_is_the_width_of_the_outputs(library):
    assert model(library).num_classes == CLASSES
    assert list(model(library).metrics) == ["accuracy"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def trained_step(library, batch_norm, variables, mask):
    """Gradient, outputs and new statistics of one batch, in linen's names."""
    network = model(library, batch_norm)

    def loss(params):
        outputs, mutable = network.apply(
            Variables(params, variables.mutable), BATCHES, train=True, mask=mask
        )
        return jnp.sum(network.loss(outputs, BATCHES) * mask), (outputs, mutable)

    gradient, (outputs, mutable) = jax.grad(loss, has_aux=True)(variables.params)
    gradient, mutable = to_linen(library, Variables(gradient, mutable))
    return gradient, outputs, mutable


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("library", ["nnx", "haiku"])
def test_outputs_gradients_and_statistics_are_linens(library, batch_norm):
    start = weights(batch_norm)
    expected = trained_step("linen", batch_norm, start, MASK)
    actual = trained_step(library, batch_norm, from_linen(library, start), MASK)
    assert_close(actual, expected)
    predicted = [
        model(name, batch_norm).apply(from_linen(name, start), BATCHES)[0]
        for name in ("linen", library)
    ]
    assert_close(*predicted)


def test_the_reference_of_the_comparison_is_the_network():
    params, statistics = weights(True)
    outputs, _ = model("linen").apply(weights(True), BATCHES)
    hidden = BATCHES["image"] @ params["first"]["kernel"] + params["first"]["bias"]
    running = statistics["batch_stats"]
    hidden = np.maximum((hidden - running["mean"]) / np.sqrt(running["var"] + 1e-5), 0)
    assert_close(outputs, hidden @ params["second"]["kernel"] + params["second"]["bias"])


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_mask_reaches_the_network(library):
    """Statistics are those of real examples, whatever the padded ones hold."""
    start = from_linen(library, weights(True))
    _, mutable = model(library).apply(start, BATCHES, train=True, mask=MASK)
    real = {name: values[:4] for name, values in BATCHES.items()}
    _, expected = model(library).apply(start, real, train=True)
    assert_close(mutable, expected)
    _, unmasked = model(library).apply(start, BATCHES, train=True)
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), mutable, unmasked)))


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_axis_name_reaches_the_network(library):
    """A batch sharded over two devices has the statistics of the whole."""
    start = from_linen(library, weights(True))
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("clients"),
        out_specs=(PartitionSpec("clients"), PartitionSpec()),
        check_vma=False,
    )
    def sharded(batch, mask):
        return model(library).apply(start, batch, train=True, mask=mask, axis_name="clients")

    whole = model(library).apply(start, BATCHES, train=True, mask=MASK)
    assert_close(jax.jit(sharded)(BATCHES, MASK), whole)


@pytest.mark.parametrize("library", LIBRARIES)
def test_evaluation_leaves_mutable_state_and_needs_no_key(library):
    network = model(library, True, 0.5)
    start = from_linen(library, weights(True))
    outputs, mutable = network.apply(start, BATCHES)
    jax.tree.map(np.testing.assert_array_equal, mutable, start.mutable)
    again, _ = network.apply(start, BATCHES, key=jax.random.key(3))
    np.testing.assert_array_equal(outputs, again)
    assert_close(outputs, model("linen").apply(weights(True), BATCHES)[0])
    _, trained = network.apply(start, BATCHES, train=True, key=jax.random.key(3))
    assert jax.tree.structure(trained) == jax.tree.structure(start.mutable)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), trained, start.mutable)
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize("library", LIBRARIES)
def test_dropout_follows_the_key(library):
    network = model(library, False, 0.5)
    start = from_linen(library, weights(False))
    apply = jax.jit(lambda key: network.apply(start, BATCHES, train=True, key=key)[0])
    first, second = apply(jax.random.key(0)), apply(jax.random.key(1))
    np.testing.assert_array_equal(first, apply(jax.random.key(0)))
    assert np.abs(first - second).max() > 0.1
    # Dropout keeps expectations: the output layer is linear in what it drops.
    mean = jnp.mean(jax.vmap(apply)(jax.random.split(jax.random.key(2), 4000)), axis=0)
    np.testing.assert_allclose(mean, network.apply(start, BATCHES)[0], rtol=0.1, atol=0.15)


@functools.partial(jax.jit, static_argnums=0)
def local_round(library, variables):
    size = jnp.asarray(BATCH)
    data = ClientData(BATCHES, jnp.asarray(0), size, size, BATCH, ragged=False)
    training = LocalTraining(batch_size=4, epochs=3)
    trained = train_client(model(library), training, variables, data, jax.random.key(0), 0.1)
    return to_linen(library, trained.variables), trained.loss


@pytest.mark.parametrize("library", ["nnx", "haiku"])
def test_local_training_is_linens(library):
    """A whole round of a client, inside jit and a loop, its last batches padded."""
    start = weights(True)
    actual, expected = local_round(library, from_linen(library, start)), local_round("linen", start)
    assert_close(actual, expected)
    moved = np.abs(expected[0][0]["second"]["kernel"] - start.params["second"]["kernel"])
    assert moved.max() > 0.01


@pytest.mark.parametrize("library", LIBRARIES)
def test_models_work_under_vmap_and_scan(library):
    """Weights on a leading axis, as for clients in a chunk, and state carried by a scan."""
    network = model(library, True, 0.5)
    start = from_linen(library, weights(True))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 0.1]), start)
    keys = jax.random.split(jax.random.key(0), 2)

    def apply(variables, key):
        return network.apply(variables, BATCHES, train=True, key=key, mask=MASK)

    vmapped = jax.jit(jax.vmap(apply))(stacked, keys)
    for index in range(2):
        alone = apply(jax.tree.map(lambda leaf, i=index: leaf[i], stacked), keys[index])
        assert_close(jax.tree.map(lambda leaf, i=index: leaf[i], vmapped), alone)

    def step(mutable, key):
        outputs, mutable = apply(start._replace(mutable=mutable), key)
        return mutable, outputs

    mutable, outputs = jax.jit(lambda: jax.lax.scan(step, start.mutable, keys))()
    first, after_first = apply(start, keys[0])
    second, after_second = apply(start._replace(mutable=after_first), keys[1])
    assert_close((mutable, outputs), (after_second, jnp.stack([first, second])))


@pytest.mark.parametrize("library", LIBRARIES)
def test_inputs_loss_and_metrics_can_be_chosen(library):
    makers = {
        "linen": lambda **options: from_flax_linen(nn.Dense(2), EXAMPLE, **options),
        "nnx": lambda **options: from_flax_nnx(
            lambda rngs: nnx.Linear(FEATURES, 2, rngs=rngs), EXAMPLE, **options
        ),
        "haiku": lambda **options: from_haiku(lambda x: hk.Linear(2)(x), EXAMPLE, **options),
    }
    network = makers[library](
        inputs="x",
        loss=lambda outputs, batch: outputs[:, 0] - batch["y"],
        metrics={"top": accuracy("y")},
    )
    variables = network.init(jax.random.key(0))
    batch = {"x": jnp.ones((3, FEATURES)), "y": jnp.zeros(3)}
    outputs, mutable = network.apply(variables, batch, train=True)
    assert outputs.shape == (3, 2)
    assert not jax.tree.leaves(mutable)
    np.testing.assert_allclose(network.loss(outputs, batch), outputs[:, 0])
    assert list(network.metrics) == ["top"]


def test_modules_own_batch_normalisation_trains():
    """The libraries' stock layers work too: their state is `mutable`."""

    class Stock(nn.Module):
        @nn.compact
        def __call__(self, x, *, train=False, mask=None):
            mask = None if mask is None else mask[:, None] > 0
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(2)(x), mask=mask)

    class StockNNX(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(FEATURES, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)

        def __call__(self, x, *, mask=None):
            mask = None if mask is None else mask[:, None] > 0
            return self.norm(self.dense(x), mask=mask)

    def stock_haiku(x, is_training):
        return hk.BatchNorm(True, True, 0.99)(hk.Linear(2)(x), is_training)

    networks = {
        "linen": from_flax_linen(Stock(), EXAMPLE),
        "nnx": from_flax_nnx(StockNNX, EXAMPLE),
        "haiku": from_haiku(stock_haiku, EXAMPLE),
    }
    for name, network in networks.items():
        variables = network.init(jax.random.key(0))
        outputs, mutable = network.apply(variables, BATCHES, train=True, mask=MASK)
        rows = outputs if name == "haiku" else outputs[:4]  # Haiku's layer knows no mask
        np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-5)
        assert jax.tree.structure(mutable) == jax.tree.structure(variables.mutable)
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), mutable, variables.mutable)
        assert max(jax.tree.leaves(moved)) > 1e-3
        _, unchanged = network.apply(variables._replace(mutable=mutable), BATCHES)
        jax.tree.map(np.testing.assert_array_equal, unchanged, mutable)


class Flagged(nn.Module):
    """A network whose call needs an argument for training."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=not train)(x))


class Misnamed(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=not training)(x))


def test_a_network_that_must_be_told_of_training_is():
    model = from_flax_linen(Flagged(), EXAMPLE)
    variables = model.init(jax.random.key(0))
    told = lambda train: model.apply(variables, BATCHES, train=train, key=jax.random.key(1))[0]
    assert np.abs(told(True) - told(False)).max() > 0.1


@pytest.mark.parametrize("loss", [None, lambda outputs, batch: outputs[:, 0]])
def test_a_network_is_traced_once_to_be_initialised_and_once_to_be_checked(loss):
    traces = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            traces.append(x.shape)
            return nn.Dense(CLASSES)(x)

    from_flax_linen(Counted(), EXAMPLE, **({} if loss is None else {"loss": loss}))
    assert len(traces) == 2


def test_outputs_without_a_leading_batch_axis_are_traced_for_each_size():
    """A loss of these outputs has one number per example for both sizes of batches."""

    class Turned(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(CLASSES)(x).T

    model = from_flax_linen(Turned(), EXAMPLE, loss=lambda outputs, batch: outputs[0], metrics={})
    variables = model.init(jax.random.key(0))
    outputs, _ = model.apply(variables, BATCHES)
    assert model.loss(outputs, BATCHES).shape == (BATCH,)


def test_another_name_of_training_is_refused():
    """Without the argument the network would train in evaluation mode."""
    message = "parameter `train` for the training mode: Misnamed has 'training'"
    with pytest.raises(ValueError, match=message) as error:
        from_flax_linen(Misnamed(), EXAMPLE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ({"a": EXAMPLE}, {}, r"^inputs must name all columns of example, \('a',\), got 'image'"),
        (
            EXAMPLE,
            {"inputs": ("a", "b")},
            r"^example must be a dictionary of the columns that inputs=",
        ),
        (
            {"a": EXAMPLE},
            {"inputs": ("a", "b")},
            r"^inputs must name the columns of example, \('a',\)",
        ),
        (EXAMPLE, {"metrics": {"a": "accuracy"}}, r"^metrics\['a'\] must be a statistic"),
    ],
)
def test_inputs_and_the_example_fit_together(example, options, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        from_flax_linen(nn.Dense(3), example, **options)
    assert "\n" not in str(error.value)


def test_haiku_s_functions_are_given_as_they_are():
    network = lambda x: hk.Linear(3)(x)
    for transform in (hk.transform, hk.transform_with_state):
        with pytest.raises(TypeError, match=r"^network must be the function itself, and not what"):
            from_haiku(transform(network), EXAMPLE)
    with pytest.raises(
        TypeError, match=r"^network must be a function .* lambda x: Linear\(...\)\(x\)"
    ):
        from_haiku(hk.Linear, EXAMPLE)


@pytest.mark.parametrize("make", [from_flax_linen, from_haiku])
@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ((1, 4), {}, r"^example must be an array \[batch, ...\], such as .*, got \(1, 4\)"),
        (jnp.float32(0), {}, r"^example must be an array \[batch, ...\]"),
        (
            np.zeros((1, 4)),
            {"loss": "mse"},
            r"^loss must be a function \(outputs, batch\) -> losses",
        ),
        (np.zeros((1, 4)), {"loss": lambda outputs: 0}, r"^loss .* got one of \(outputs\)"),
        (np.zeros((1, 4)), {"metrics": [len]}, "^metrics must be statistics by name, got"),
    ],
)
def test_bad_input_is_one_line(make, example, options, message):
    network = nn.Dense(3) if make is from_flax_linen else lambda x: hk.Linear(3)(x)
    with pytest.raises(TypeError, match=message) as error:
        make(network, example, **options)
    assert "\n" not in str(error.value)


class Embedding(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Embed(7, 3)(x).mean(1)


@pytest.mark.parametrize(
    ("make", "network", "line"),
    [
        pytest.param(from_flax_linen, Embedding(), r" \(test_model.py, line \d+\)", id="linen"),
        pytest.param(from_flax_nnx, lambda rngs: nnx.Embed(7, 3, rngs=rngs), "", id="nnx"),
        pytest.param(
            from_haiku,
            lambda x: hk.Embed(7, 3)(x).mean(1),
            r" \(test_model.py, line \d+\)",
            id="haiku",
        ),
    ],
)
def test_an_example_that_a_network_does_not_take_is_named(make, network, line):
    """The error may be the example's or the network's, so its own message and place stay."""
    message = r"^the network does not fit the example {'tokens': float32\[1, 4\]}"
    message += f"{line}: .*integer"
    with pytest.raises((TypeError, ValueError), match=message) as error:
        make(network, jnp.zeros((1, 4)), inputs="tokens")
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


def test_what_is_no_linen_module_is_named():
    for module, message in (
        (
            nn.Dense,
            r"^module must be a flax.linen.Module, such as Dense\(...\), got the class itself",
        ),
        (
            nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
            r"^module must be .*modules of Flax NNX are for from_flax_nnx",
        ),
        (lambda x: x, r"^module must be a flax.linen.Module, got"),
    ):
        with pytest.raises(TypeError, match=message) as error:
            from_flax_linen(module, EXAMPLE)
        assert "\n" not in str(error.value)


def test_nnx_modules_are_made_by_a_function():
    with pytest.raises(TypeError, match=r"^create must be a function of nnx.Rngs, .* made already"):
        from_flax_nnx(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), EXAMPLE)

    class Network(nnx.Module):
        def __init__(self, classes=3, *, rngs):
            self.layer = nnx.Linear(4, classes, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    class Inherits(Network):
        pass

    class AnyPlace(Network):
        def __init__(self, classes, rngs):
            super().__init__(classes, rngs=rngs)

    partial = functools.partial
    for create in (Network, Inherits, partial(Network, 3), partial(AnyPlace, classes=3)):
        assert from_flax_nnx(create, EXAMPLE).num_classes == 3


def test_an_nnx_network_whose_dropout_has_a_key_of_its_own_is_one_line():
    """It dropped the same in all steps, at all clients and with all seeds."""

    class Network(nnx.Module):
        def __init__(self, first, second):
            self.before, self.after = nnx.Dropout(0.5, rngs=first), nnx.Dropout(0.5, rngs=second)
            self.layer = nnx.Linear(4, 3, rngs=first)

        def __call__(self, x):
            return self.after(self.layer(self.before(x)))

    for create in (
        lambda rngs: Network(nnx.Rngs(0), nnx.Rngs(1)),
        lambda rngs: Network(rngs, nnx.Rngs(0)),
    ):
        with pytest.raises(
            ValueError, match=r"^create must make all of the module with the nnx\.R"
        ):
            from_flax_nnx(create, EXAMPLE)
    assert from_flax_nnx(lambda rngs: Network(rngs, rngs), EXAMPLE).num_classes == 3


AVERAGED = {"loss": lambda outputs, batch: jnp.mean(outputs, axis=(1, 2)), "metrics": {}}


class OfParts(nn.Module):
    parts: dict[str, nn.Module]

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(3)(self.parts["norm"](x, **self.flags(train)))

    def flags(self, train):
        is_batch_norm = isinstance(self.parts["norm"], nn.BatchNorm)
        return {"use_running_average": not train} if is_batch_norm else {}


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, lambda: nn.GroupNorm(2), nn.InstanceNorm]
)
def test_normalisations_in_attributes_are_those_of_the_whole_batch(norm):
    """Those of single examples were averaged with the examples of other devices."""
    network = from_flax_linen(OfParts({"norm": norm()}), jnp.zeros((1, 2, 4)), **AVERAGED)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 4)), jnp.float32)
    variables = network.init(jax.random.key(0))

    def outputs(images, axis_name=None):
        options = dict(train=True, key=jax.random.key(1), axis_name=axis_name)
        return network.apply(variables, {"image": images}, **options)[0]

    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",))
    shards = PartitionSpec("devices")
    of_two = functools.partial(outputs, axis_name="devices")
    found = jax.shard_map(of_two, mesh=mesh, in_specs=shards, out_specs=shards, check_vma=False)
    np.testing.assert_allclose(
        jax.jit(found)(images), jax.jit(outputs)(images), rtol=1e-5, atol=1e-6
    )


class Sizes(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class WithConstants(nn.Module):
    norm: nn.Module
    sizes: Sizes = Sizes(3, 4)
    widths: ClassVar[tuple[int, ...]] = (8, 8)
    later: Any = dataclasses.field(init=False)
    fixed: tuple[int, ...] = dataclasses.field(init=False, default=(1, 2))

    def setup(self):
        self.layers = [nn.Dense(width) for width in self.widths]

    def __call__(self, x, train=False):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x, use_running_average=not train)


def test_a_network_on_several_devices_keeps_fields_that_are_no_arguments():
    network = from_flax_linen(WithConstants(nn.BatchNorm()), EXAMPLE)
    variables = network.init(jax.random.key(0))
    apply = lambda image: network.apply(
        variables, {"image": image}, train=True, key=jax.random.key(1), axis_name="devices"
    )[0]
    images = jnp.ones((2, 3, *EXAMPLE.shape[1:]))
    assert jax.vmap(apply, axis_name="devices")(images).shape == (2, 3, 8)


def test_every_library_takes_several_columns():
    columns = {"a": jnp.ones((1, 4)), "b": jnp.ones((1, 2))}
    joined = lambda x: jnp.concatenate([x["a"], x["b"]], axis=-1)

    class OfTwo(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(6, 3, rngs=rngs)

        def __call__(self, x):
            return self.layer(joined(x))

    for model in (
        from_haiku(lambda x: hk.Linear(3)(joined(x)), columns, inputs=("a", "b")),
        from_flax_nnx(OfTwo, columns, inputs=("a", "b")),
    ):
        assert model.inputs == ("a", "b")
        batch = {"a": jnp.ones((5, 4)), "b": jnp.ones((5, 2))}
        assert model.outputs(model.init(jax.random.key(0)), batch).shape == (5, 3)
    with pytest.raises(ValueError, match=r"^inputs must name the columns of example"):
        from_haiku(lambda x: x["a"], columns, inputs=("a",))


@pytest.mark.parametrize("outputs", [None, {"aux": 0}])
def test_a_network_without_outputs_is_named(outputs):
    def network(x):
        hk.Linear(3)(x)
        return jax.tree.map(jnp.float32, outputs)

    with pytest.raises(
        TypeError, match=r"the network must return outputs with a leading batch axis"
    ):
        from_haiku(network, EXAMPLE, loss=lambda outputs, batch: batch["y"], metrics={})


def test_outputs_that_the_default_loss_or_metric_cannot_read_are_named():
    network = lambda x: (hk.Linear(3)(x), x)
    loss = lambda outputs, batch: outputs[0][:, 0]
    message = (
        r"^loss cross_entropy needs logits \[batch, classes\], got a tuple of 2: .* give loss="
    )
    with pytest.raises(ValueError, match=message) as error:
        from_haiku(network, EXAMPLE)
    assert "\n" not in str(error.value)
    # Metrics may be replaced later, so they are refused where they are computed.
    own = from_haiku(network, EXAMPLE, loss=loss)
    outputs = own.outputs(own.init(jax.random.key(0)), BATCHES)
    message = r"^outputs must be logits .*, got a tuple of 2: .* give metrics="
    with pytest.raises(ValueError, match=message) as error:
        own.metrics["accuracy"](outputs, BATCHES)
    assert "\n" not in str(error.value)


class Sows(nn.Module):
    collection: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(CLASSES)(x)
        self.sow(self.collection, "mean", jnp.mean(x))
        return x


class Kept(nnx.Variable):
    pass


class NNXSows(nnx.Linear):
    def __init__(self, kind, rngs):
        super().__init__(FEATURES, CLASSES, rngs=rngs)
        self.kind = kind

    def __call__(self, x):
        x = super().__call__(x)
        self.sow(self.kind, "mean", jnp.mean(x))
        return x


SOWS = {
    "linen": (lambda: from_flax_linen(Sows("intermediates"), EXAMPLE), None),
    "linen, own": (
        lambda: from_flax_linen(Sows("losses"), EXAMPLE),
        "^module must not add to its mutable state .* adds 'losses/mean/1'. .* 'intermediates'",
    ),
    "nnx": (lambda: from_flax_nnx(lambda rngs: NNXSows(nnx.Intermediate, rngs), EXAMPLE), None),
    "nnx, own": (
        lambda: from_flax_nnx(lambda rngs: NNXSows(Kept, rngs), EXAMPLE),
        "^create must not add to its mutable state .* adds 'mean/0'. .* nnx.Intermediate",
    ),
}


@pytest.mark.parametrize("case", SOWS)
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_values_are_no_state(case):
    make, refusal = SOWS[case]

    def before_and_after():
        network = make()
        variables = network.init(jax.random.key(0))
        train = lambda: network.apply(variables, BATCHES, train=True, key=jax.random.key(1))
        return variables.mutable, jax.eval_shape(train)[1]

    if refusal is None:
        assert before_and_after() == ({}, {})
        return
    with pytest.raises(ValueError, match=refusal) as error:
        before_and_after()
    assert "\n" not in str(error.value)


def test_logits_among_other_outputs_tell_the_number_of_classes():
    network = lambda x: {"embedding": x, "logits": hk.Linear(3)(x), "scale": jnp.float32(1)}
    loss = lambda outputs, batch: outputs["logits"][:, 0]
    assert from_haiku(network, EXAMPLE, loss=loss, metrics={}).num_classes == 3


def test_a_number_per_example_is_one_class():
    """Not as many as the batch of the example has examples, over which a softmax would be taken."""
    number = lambda x: hk.Linear(1)(x)[:, 0]
    model = from_haiku(number, EXAMPLE, loss=lambda outputs, batch: outputs**2, metrics={})
    assert model.num_classes == 1
    both = lambda x: {"number": number(x), "scores": hk.Linear(20)(x)}
    loss = lambda outputs, batch: outputs["number"] ** 2
    assert from_haiku(both, EXAMPLE, loss=loss, metrics={}).num_classes == 20


def test_random_streams_of_other_names_follow_the_key():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            if train:
                x = x + jax.random.normal(self.make_rng("noise"), x.shape)
            return nn.Dense(3)(x)

    model = from_flax_linen(Noisy(), EXAMPLE)
    variables = model.init(jax.random.key(0))
    trained = lambda seed: model.apply(
        variables, {"image": jnp.ones((2, 4))}, train=True, key=jax.random.key(seed)
    )[0]
    np.testing.assert_array_equal(trained(0), trained(0))
    assert not np.allclose(trained(0), trained(1))
