"""Losses and metrics are one number per example, or refused in one line before anything compiles."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist import per_example
from fedcodist.algorithms.clients.fed_avg import fed_avg
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.example_losses import checked_loss, checked_statistic
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.metrics import (
    accuracy,
    average_precision,
    f_score,
    macro_f_score,
    of_one_logit,
)
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.divergences import softened_target
from fedcodist.run.experiment import Experiment, check_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

DRAWS = np.random.default_rng(0)
IMAGES = DRAWS.normal(size=(6, 4)).astype(np.float32)
TARGETS = DRAWS.normal(size=(6, 1)).astype(np.float32)
DATA = FederatedData.from_arrays({"image": IMAGES, "target": TARGETS}, offsets=[0, 3, 6])
EXAMPLE = jnp.zeros((1, 4))
squares = lambda outputs, batch: (outputs[:, 0] - batch["target"][:, 0]) ** 2

WRONG_LOSSES = {
    "mean": (1, lambda outputs, batch: jnp.mean((outputs - batch["target"]) ** 2)),
    "mean of labels": (
        3,
        lambda outputs, batch: optax.softmax_cross_entropy_with_integer_labels(
            outputs, batch["label"]
        ).mean(),
    ),
    "column": (1, lambda outputs, batch: (outputs - batch["target"]) ** 2),
    "mean that keeps its axes": (
        1,
        lambda outputs, batch: jnp.mean((outputs - batch["target"]) ** 2, keepdims=True),
    ),
    "constant": (3, lambda outputs, batch: jnp.zeros(11)),
    "two unknown columns": (4, lambda outputs, batch: jnp.mean(outputs * batch["a"] + batch["b"])),
}


@pytest.mark.parametrize("case", WRONG_LOSSES)
def test_a_loss_of_another_shape_is_refused_when_the_model_is_made(case):
    width, loss = WRONG_LOSSES[case]
    with pytest.raises(
        ValueError, match=r"loss must have one number per example, \[batch\]"
    ) as error:
        from_flax_linen(nn.Dense(width), EXAMPLE, loss=loss, metrics={})
    assert "\n" not in str(error.value)


RIGHT_LOSSES = {
    "column read": (1, squares),
    "sum and weights": (
        4,
        lambda outputs, batch: jnp.sum((outputs - batch["target"]) ** 2, -1) * batch["weight"],
    ),
    "of the inputs": (4, lambda outputs, batch: jnp.mean((outputs - batch["image"]) ** 2, -1)),
    "a shape that nobody guesses": (
        4,
        lambda outputs, batch: batch["target"].reshape(-1, 3, 9).sum((1, 2)) + outputs[:, 0],
    ),
    "several targets": (
        2,
        lambda outputs, batch: (
            jnp.mean((outputs[:, None] - batch["target"]) ** 2, (1, 2)) * batch["weight"]
        ),
    ),
    "several votes": (
        3,
        lambda outputs, batch: (
            -jnp.sum(jax.nn.log_softmax(outputs)[:, None] * batch["votes"], axis=(1, 2))
        ),
    ),
    "a mean, asked for": (
        1,
        per_example(lambda outputs, batch: jnp.mean((outputs - batch["target"]) ** 2)),
    ),
}


@pytest.mark.parametrize("case", RIGHT_LOSSES)
def test_a_loss_per_example_is_taken(case):
    width, loss = RIGHT_LOSSES[case]
    assert from_flax_linen(nn.Dense(width), EXAMPLE, loss=loss, metrics={}).metrics == {}


WRONG_METRICS = {
    "one array": (lambda outputs, batch: outputs[:, 0], "must return two arrays"),
    "an array of two": (lambda outputs, batch: outputs[:, :2].T, "must return two arrays"),
    "a dictionary": (lambda outputs, batch: {"a": 1, "b": 2}, "must return two arrays"),
    "a mean": (lambda outputs, batch: (jnp.mean(outputs), 1.0), "values must have one number"),
    "a column": (lambda outputs, batch: (outputs[:, :1],) * 2, "values must have one number"),
    "one weight": (lambda outputs, batch: (outputs[:, 0], 1.0), "weights must have one number"),
}


@pytest.mark.parametrize("case", WRONG_METRICS)
def test_a_metric_of_another_shape_is_refused_when_the_model_is_made(case):
    metric, says = WRONG_METRICS[case]
    with pytest.raises(ValueError, match=rf"metrics\['odd'\].*{says}") as error:
        from_flax_linen(nn.Dense(3), EXAMPLE, metrics={"odd": metric})
    assert "\n" not in str(error.value)


def test_a_metric_that_refuses_the_outputs_is_named():
    message = r"^metrics\['f'\]: outputs must be \[batch, classes\], got \[11, 2, 3\]"
    loss = lambda outputs, batch: jnp.zeros(len(outputs))
    with pytest.raises(ValueError, match=message):
        from_flax_linen(
            nn.Dense(3), jnp.zeros((1, 2, 4)), loss=loss, metrics={"f": macro_f_score()}
        )


def hand_made(loss, metrics=None):
    """A Model that was made without any checks."""
    model = from_flax_linen(nn.Dense(1), EXAMPLE, loss=squares, metrics={})
    return model._replace(loss=loss, metrics=metrics or {})


mean_of_squares = lambda outputs, batch: jnp.mean((outputs - batch["target"]) ** 2)


def experiment_of(model, splits=None, method=fed_avg):
    algorithm = independent_pools(
        {"main": Pool(method(model, LocalTraining(batch_size=2)), np.arange(2), 2)}, DATA.columns
    )
    return Experiment(algorithm, resident_data(DATA), splits or {"test": DATA}, 1)


def test_training_checks_the_loss_where_it_is_traced():
    model = hand_made(mean_of_squares)
    with pytest.raises(
        ValueError, match=r"one number per example, \[batch\] = \[2\], got float32\[\]"
    ):
        experiment_of(model)
    with pytest.raises(ValueError, match="one number per example"):
        jax.eval_shape(lambda key: one_client(model, key), jax.random.key(0))


def one_client(model, key, batch_size=2):
    count = jnp.int32(3)
    columns = {name: jnp.asarray(column) for name, column in DATA.columns.items()}
    data = ClientData(columns, jnp.int32(0), count, count, 3, False)
    training = LocalTraining(optax.sgd, batch_size)
    train = lambda: train_client(model, training, model.init(key), data, key, 0.1)
    return jax.jit(train)().variables.params


def test_check_experiment_evaluates_losses_and_metrics_of_all_splits_by_shape():
    one_array = {"odd": lambda outputs, batch: outputs[:, 0]}
    with pytest.raises(
        ValueError, match=r"model 'main' on split 'test': metrics\['odd'\]"
    ) as error:
        check_experiment(experiment_of(hand_made(squares, one_array)))
    assert "\n" not in str(error.value)
    good = experiment_of(hand_made(squares))
    assert check_experiment(good) == 10
    without = FederatedData.from_arrays({"image": IMAGES}, offsets=[0, 6])
    with pytest.raises(
        ValueError, match="model 'main' on split 'late': there is no column 'target'"
    ):
        check_experiment(good._replace(final_splits={"late": without}))


def wrong_metric(outputs, batch):
    raise RuntimeError("cannot be\nmeasured")


def test_a_column_that_preprocessing_drops_is_said_to_be_dropped():
    experiment = experiment_of(hand_made(squares), {"late": DATA})
    experiment = experiment._replace(
        evaluation_preprocess=lambda batch, key, positions: {"image": batch["image"]}
    )
    message = r"on split 'late': evaluation_preprocess must keep column 'target' \(in loss, "
    with pytest.raises(ValueError, match=message):
        check_experiment(experiment)


def test_the_name_of_what_lines_have_per_client_is_taken():
    metrics = {"per_client": accuracy()}
    with pytest.raises(
        ValueError, match=r"metrics\['per_client'\] of model 'main' must have a name"
    ):
        check_experiment(experiment_of(hand_made(squares, metrics)))


@pytest.mark.parametrize(
    ("metrics", "columns", "message"),
    [
        ({}, ["image"], r"there is no column 'target', only \['image'\] \(in loss, "),
        (
            {"own": lambda outputs, batch: (batch["number"], batch["number"])},
            ["image", "target"],
            r"there is no column 'number', only .* \(in metrics\['own'\], ",
        ),
        ({"own": wrong_metric}, ["image", "target"], r"cannot be \(in metrics\['own'\], "),
    ],
)
def test_the_loss_or_metric_that_does_not_fit_the_data_is_named(metrics, columns, message):
    split = FederatedData.from_arrays({n: DATA.columns[n] for n in columns}, offsets=[0, 6])
    experiment = experiment_of(hand_made(squares, metrics), {"late": split})
    with pytest.raises(ValueError) as error:
        check_experiment(experiment)
    pattern = rf"model 'main' on split 'late': {message}test_example_losses\.py, line \d+\)\.?"
    assert re.fullmatch(pattern, str(error.value))


def test_a_mean_that_was_asked_for_is_the_loss_per_example():
    """Includes a padded last batch: NumPy's steps over 2 and 1 examples, and over one batch of 4."""
    models = [hand_made(squares), hand_made(per_example(mean_of_squares))]
    for batch_size in (2, 4):
        expected, found = (one_client(model, jax.random.key(0), batch_size) for model in models)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    model, key = models[1], jax.random.key(0)
    kernel, bias = (np.asarray(model.init(key).params[name], float) for name in ("kernel", "bias"))
    error = IMAGES[:3] @ kernel + bias - TARGETS[:3]
    after = one_client(model, key, 4)["kernel"]
    np.testing.assert_allclose(after, kernel - 0.1 * 2 * IMAGES[:3].T @ error / 3, rtol=1e-5)


def test_a_mean_of_several_numbers_is_refused():
    loss = per_example(lambda outputs, batch: (outputs - batch["target"]) ** 2)
    with pytest.raises(ValueError, match=r"one number for a batch, got \[1, 3\]"):
        loss(jnp.zeros((2, 3)), {"target": jnp.zeros((2, 3))})


def test_one_logit_has_no_accuracy_unless_it_is_asked_for():
    loss = lambda outputs, batch: optax.sigmoid_binary_cross_entropy(outputs[:, 0], batch["label"])
    with pytest.raises(ValueError, match=r"of_one_logit\(accuracy\(\)\)") as error:
        from_flax_linen(nn.Dense(1), EXAMPLE, loss=loss)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"cross_entropy needs .* at least two classes"):
        from_flax_linen(nn.Dense(1), EXAMPLE)
    with pytest.raises(
        ValueError, match=r"needs .* at least two classes, got \[11\]: .*outputs, b"
    ):
        from_flax_linen(nn.Sequential([nn.Dense(1), lambda x: x[:, 0]]), EXAMPLE)
    with pytest.raises(ValueError, match=r"must have at least two classes, got \[3\]"):
        average_precision().sums(jnp.zeros(3), {"label": jnp.zeros(3, jnp.int32)})
    with pytest.raises(ValueError, match="at least two classes"):
        softened_target(jnp.zeros((3, 1)), 2.0)
    with pytest.raises(TypeError, match=r"must return logits .*, got a tuple of 2\."):
        softened_target((jnp.zeros((3, 2)), jnp.zeros(3)), 2.0)
    model = from_flax_linen(
        nn.Dense(1), EXAMPLE, loss=loss, metrics={"accuracy": of_one_logit(accuracy())}
    )
    logits, labels = jnp.array([[-1.0], [2.0], [0.3], [-0.2]]), jnp.array([0, 1, 0, 1])
    values, weights = model.metrics["accuracy"](logits, {"label": labels})
    np.testing.assert_array_equal(values, [1, 1, 0, 0])
    np.testing.assert_array_equal(weights, 1)
    shares, _ = of_one_logit(accuracy(), threshold=0.5)(logits[:, 0], {"label": labels})
    np.testing.assert_array_equal(shares, [1, 1, 1, 0])
    values, weights = of_one_logit(f_score())(logits, {"label": labels})
    assert float(jnp.sum(values * weights) / jnp.sum(weights)) == 0.5
    # Metrics of sums over examples too.
    two = jnp.concatenate([jnp.zeros((4, 1)), logits], axis=-1)
    for metric in (average_precision(), macro_f_score()):
        found = of_one_logit(metric).sums(logits, {"label": labels})
        jax.tree.map(np.testing.assert_array_equal, found, metric.sums(two, {"label": labels}))
        # A probability is not the logarithm of odds, by which average precision ranks.
        with pytest.raises(ValueError, match=r"^threshold must be 0 for a SummedMetric.* got 0\.5"):
            of_one_logit(metric, threshold=0.5)


def flat_targets():
    """The data, whose targets are [examples] in place of [examples, 1]."""
    columns = {"image": IMAGES, "target": TARGETS[:, 0]}
    return FederatedData.from_arrays(columns, offsets=[0, 3, 6])


def experiment_of_flat_targets(model):
    data = flat_targets()
    method = fed_avg(model, LocalTraining(batch_size=2))
    algorithm = independent_pools({"main": Pool(method, np.arange(2), 2)}, data.columns)
    return Experiment(algorithm, resident_data(data), {"test": data}, 1)


# [batch, 1] - [batch] is [batch, batch].
mixing = lambda outputs, batch: jnp.mean((outputs - batch["target"]) ** 2, axis=-1)


def test_a_loss_that_compares_each_example_with_all_is_refused():
    model = from_flax_linen(nn.Dense(1), EXAMPLE, loss=mixing, metrics={})
    check_experiment(experiment_of(model))  # for targets [examples, 1] it is right
    message = (
        r"loss must compute an example's number from this example alone, but it broadcasts 'target' "
        r"against another of image \[2, 4\], target \[2\], outputs \[2, 1\]: give both the same shape"
    )
    with pytest.raises(ValueError, match=message) as error:
        check_experiment(experiment_of_flat_targets(model))
    assert "\n" not in str(error.value)


def test_a_metric_that_compares_each_example_with_all_is_refused():
    metric = lambda outputs, batch: (mixing(outputs, batch), jnp.ones(len(outputs)))
    loss = lambda outputs, batch: (outputs[:, 0] - batch["target"]) ** 2
    model = from_flax_linen(nn.Dense(1), EXAMPLE, loss=loss, metrics={})
    check_experiment(experiment_of_flat_targets(model))
    with pytest.raises(ValueError, match=r"metrics\['error'\] must compute an example's number"):
        check_experiment(experiment_of_flat_targets(model._replace(metrics={"error": metric})))


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, batch: jnp.mean(outputs**2, axis=-1),
        lambda outputs, batch: outputs[:, 0] - batch["target"],
        per_example(lambda outputs, batch: jnp.mean((outputs[:, 0] - batch["target"]) ** 2)),
        lambda outputs, batch: (
            per_example(lambda o, b: jnp.sum(o * b["target"]))(outputs, batch) + outputs[:, 0]
        ),
    ],
)
def test_a_loss_of_each_example_alone_is_taken(loss):
    model = from_flax_linen(nn.Dense(1), EXAMPLE, loss=loss, metrics={})
    check_experiment(experiment_of_flat_targets(model))


# As many examples as classes, so that no axis is told from another by its length.
SIZE = 10
LOGITS = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
cross_entropies = optax.softmax_cross_entropy_with_integer_labels


def columns_of(shape):
    float_of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return {
        "image": float_of(SIZE, 4),
        "label": jax.ShapeDtypeStruct((SIZE,), jnp.int32),
        "table": float_of(7),
        "target": float_of(*shape),
        "weight": float_of(SIZE),
    }


MIXING = {
    "plain": mixing,
    "jitted": jax.jit(mixing),
    "of a copy": lambda outputs, batch: mixing(outputs, {**batch}),
    "weighted": lambda outputs, batch: mixing(outputs, batch) * batch["weight"],
    "in a branch": lambda outputs, batch: jax.lax.cond(
        batch["label"][0] > 0, mixing, lambda *case: 2 * mixing(*case), outputs, batch
    ),
}
OF_KIND = {
    "loss": lambda function, *case: checked_loss(function, *case),
    "loss_hook": lambda function, *case: checked_loss(function, *case, "loss_hook"),
    "values": lambda function, *case: checked_statistic(
        "m", lambda outputs, batch: (function(outputs, batch), jnp.ones(len(outputs))), *case
    ),
    "weights": lambda function, *case: checked_statistic(
        "m", lambda outputs, batch: (jnp.ones(len(outputs)), function(outputs, batch)), *case
    ),
    "sums": lambda function, *case: checked_statistic("m", SummedMetric(function, jnp.sum), *case),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, "plain") for kind in OF_KIND if kind != "loss"] + [("loss", case) for case in MIXING],
)
@pytest.mark.parametrize(("width", "target"), [((1,), ()), ((), (1,))])
def test_a_broadcast_of_targets_against_outputs_is_refused(kind, case, width, target):
    outputs = jax.ShapeDtypeStruct((SIZE, *width), jnp.float32)
    check = lambda *arguments: OF_KIND[kind](MIXING[case], *arguments)
    with pytest.raises(ValueError, match="from this example alone, but it broadcasts"):
        jax.eval_shape(check, outputs, columns_of((SIZE, *target)))
    # Targets of the outputs' shape, with an axis of one value, are right.
    jax.eval_shape(check, jax.ShapeDtypeStruct((SIZE, 1), jnp.float32), columns_of((SIZE, 1)))


BESIDE_OTHERS = {
    "between columns": lambda outputs, batch: (
        outputs[:, 0] + jnp.mean(batch["target"] - batch["weight"], -1)
    ),
    "beside a mean, asked for": lambda outputs, batch: (
        per_example(mean_of_squares)(outputs, batch)
        + jnp.mean((outputs[:, :1] - batch["weight"]) ** 2, -1)
    ),
}


@pytest.mark.parametrize("case", BESIDE_OTHERS)
def test_a_broadcast_beside_terms_of_each_example_alone_is_refused(case):
    check = lambda *arguments: checked_loss(BESIDE_OTHERS[case], *arguments)
    with pytest.raises(ValueError, match="it broadcasts 'weight' against another of image"):
        jax.eval_shape(check, LOGITS, columns_of((SIZE, 1)))


def entropies(outputs):
    return -jnp.sum(jax.nn.softmax(outputs) * jax.nn.log_softmax(outputs), axis=-1)


ALONE = {
    "weights of a column": lambda outputs, batch: (entropies(outputs), batch["weight"]),
    "weights of a label": lambda outputs, batch: (
        (jnp.argmax(outputs, -1) == 2).astype(jnp.float32),
        (batch["label"] == 2).astype(jnp.float32),
    ),
    "weights like a column": lambda outputs, batch: (
        entropies(outputs),
        jnp.ones_like(batch["label"], float),
    ),
    "columns only": lambda outputs, batch: (jax.nn.one_hot(batch["label"], SIZE)[:, 2],) * 2,
    "the length of a column": lambda outputs, batch: (
        entropies(outputs) / len(batch["image"]),
        batch["weight"],
    ),
    "a table of another length": lambda outputs, batch: (
        jnp.sum((outputs[:, :1] - batch["table"]) ** 2, -1),
        batch["weight"],
    ),
    "labels by position": lambda outputs, batch: (
        -jax.nn.log_softmax(outputs)[jnp.arange(len(batch["label"])), batch["label"]],
        batch["weight"],
    ),
    "each position": lambda outputs, batch: (
        jax.vmap(lambda i: cross_entropies(outputs[i], batch["label"][i]))(
            jnp.arange(len(outputs))
        ),
        batch["weight"],
    ),
    "a loop over positions": lambda outputs, batch: (
        jax.lax.map(
            lambda i: cross_entropies(outputs[i], batch["label"][i]), jnp.arange(len(outputs))
        ),
        batch["weight"],
    ),
    "a jitted mean, asked for": lambda outputs, batch: (
        jax.jit(per_example(lambda o, b: jnp.mean((o[:, 0] - b["weight"]) ** 2)))(outputs, batch),
        batch["weight"],
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_a_metric_of_each_example_alone_is_taken(case):
    metric = lambda *arguments: checked_statistic("m", ALONE[case], *arguments)
    values, weights = jax.eval_shape(metric, LOGITS, columns_of((SIZE, 1)))
    assert values.shape == weights.shape == (SIZE,)


def test_batches_of_one_example_have_no_others_to_mix_with():
    one = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    loss = lambda *case: checked_loss(mixing, *case)
    assert jax.eval_shape(loss, one(1, 1), {"target": one(1)}).shape == (1,)


def test_a_hook_is_traced_once_more_to_be_checked():
    """It may call networks, which take long to trace."""
    traces = []

    def hook(outputs, batch):
        traces.append(outputs.shape)
        return cross_entropies(outputs, batch["label"])

    jax.eval_shape(lambda *case: OF_KIND["loss_hook"](hook, *case), LOGITS, columns_of((SIZE, 1)))
    assert len(traces) == 2
