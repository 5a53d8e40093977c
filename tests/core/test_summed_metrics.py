"""Metrics that are functions of sums: scikit-learn's macro-F1, padding, groups, seeds and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from sklearn.metrics import average_precision_score, f1_score, top_k_accuracy_score

from fedcodist.core.example_losses import checked_statistic
from fedcodist.core.method import single_model
from fedcodist.core.metrics import (
    accuracy,
    average_precision,
    macro_f_score,
    top_k,
)
from fedcodist.core.model import Model, Variables
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.evaluation import EvaluationSplit, evaluate, evaluation_split
from fedcodist.run.metric_sums import added, grouped_sums, mean, summed

CLASSES = 5


def examples(seed, count, classes=CLASSES):
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(count, CLASSES)).astype(np.float32)
    return logits, draw.integers(0, classes, count).astype(np.int32), draw.uniform(size=count) < 0.7


def over_batches(metric, logits, labels, mask, size):
    shapes = jax.eval_shape(
        metric.sums, jnp.asarray(logits[:size]), {"label": jnp.asarray(labels[:size])}
    )
    whole = summed(metric, shapes)
    sums, total = jax.jit(whole.evaluate), whole.init()
    for first in range(0, len(labels), size):
        part = slice(first, first + size)
        batch = {"label": jnp.asarray(labels[part])}
        new = sums(jnp.asarray(logits[part]), batch, jnp.asarray(mask[part], jnp.float32))
        total = added(total, new)
    return float(jax.jit(whole.compute)(total))


@settings(max_examples=8)
@given(st.integers(0, 1000), st.sampled_from([3, 6]), st.sampled_from([2, CLASSES]))
def test_macro_f_score_is_scikit_learns_and_padding_does_not_count(seed, size, classes):
    logits, labels, mask = examples(seed, 12, classes)
    logits[~mask] = np.nan  # whatever padding holds
    found = over_batches(macro_f_score(), logits, labels, mask, size)
    if not mask.any():
        assert np.isnan(found)
        return
    expected = f1_score(labels[mask], logits[mask].argmax(-1), average="macro")
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@settings(max_examples=8)
@given(st.integers(0, 1000), st.sampled_from([4, 12]), st.integers(0, 1))
def test_average_precision_is_scikit_learns_and_padding_does_not_count(seed, size, positive):
    """With ties; whole odds are in bins of their own."""
    _, labels, mask = examples(seed, 12, classes=2)
    logits = np.random.default_rng(seed).integers(-4, 5, (12, 2)).astype(np.float32)
    odds = logits[:, positive] - logits[:, 1 - positive]
    logits[~mask] = np.nan
    found = over_batches(average_precision(positive), logits, labels, mask, size)
    is_positive = labels[mask] == positive
    if is_positive.any():
        expected = average_precision_score(is_positive, odds[mask])
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    else:
        assert np.isnan(found)


def test_average_precision_of_one_of_several_classes():
    logits, labels, mask = examples(0, 200)
    logits[np.arange(200), labels] += 1  # better than chance
    for positive in range(CLASSES):
        others = np.delete(logits, positive, axis=1).astype(np.float64)
        odds = logits[:, positive] - np.log(np.exp(others).sum(1))
        found = over_batches(average_precision(positive), logits, labels, mask, 50)
        expected = average_precision_score(labels[mask] == positive, odds[mask])
        np.testing.assert_allclose(found, expected, atol=0.01)


def test_average_precision_of_a_model_that_diverged():
    """Not that of the examples that it still answers."""
    logits = np.array([[np.nan, 0], [0, 1], [1, 0]], np.float32)
    labels = np.array([1, 1, 0], np.int32)
    assert np.isnan(over_batches(average_precision(), logits, labels, np.ones(3, bool), 2))
    with pytest.raises(ValueError, match=r"^outputs must have at least two classes, got \[3, 1\]"):
        average_precision(0).sums(jnp.zeros((3, 1)), {"label": jnp.zeros(3, jnp.int32)})


def test_average_precision_of_ties_and_of_confident_models():
    labels = np.array([0, 1, 0, 1], np.int32)
    for odds, expected in (
        ([3.0, 3.0, 3.0, 3.0], 0.5),  # the share of positives
        ([-1e3, 1e3, -1e2, 0.01], 1.0),
        ([1e3, 2.0, -1e3, 1.0], (1 / 2 + 2 / 3) / 2),
        ([20.0, 22.0, -20.0, -18.0], (1 + 2 / 3) / 2),
    ):
        logits = np.stack([np.zeros(4), odds], 1).astype(np.float32)
        found = over_batches(average_precision(), logits, labels, np.ones(4, bool), 2)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        none = over_batches(average_precision(), logits, 0 * labels, np.ones(4, bool), 2)
        assert np.isnan(none)
    with pytest.raises(ValueError, match=r"^positive must be one of the classes 0 to 1, got 2\.$"):
        average_precision(2).sums(jnp.zeros((1, 2)), {"label": jnp.zeros(1, jnp.int32)})


def test_counts_of_many_examples_are_exact():
    """A float32 would stay at 2^24."""
    metric = SummedMetric(lambda outputs, batch: outputs > 0, lambda total: total / 2)
    whole = summed(metric, jax.ShapeDtypeStruct((3,), bool))
    total = added(jnp.int32(2**24), whole.evaluate(jnp.ones(3), {}, jnp.array([1.0, 0, 0])))
    assert whole.init().dtype == jnp.int32 and int(total) == 2**24 + 1


def test_sums_keep_their_types_in_64_bits():
    with jax.enable_x64(True):
        for kind in (bool, jnp.int8, jnp.int32, jnp.float32, jnp.float64):
            metric = SummedMetric(lambda outputs, batch: outputs, lambda total: total / 2)
            like, group = jax.ShapeDtypeStruct((3,), kind), lambda batch: jnp.zeros(3, jnp.int32)
            for whole in (summed(metric, like), grouped_sums(metric, like, group, 2)):
                total = whole.evaluate(jnp.ones(3, kind), {}, jnp.ones(3))
                assert total.dtype == whole.init().dtype


def test_zeros_of_both_signs_are_a_tie():
    outputs, batch = jnp.array([[-0.0, 0.0]]), {"label": jnp.array([0])}
    assert top_k(1)(outputs, batch)[0].tolist() == [1.0] == accuracy()(outputs, batch)[0].tolist()


def test_top_k_is_scikit_learns():
    logits, labels, _ = examples(0, 40)
    statistic = mean(top_k(3))
    found = statistic.compute(
        statistic.evaluate(jnp.asarray(logits), {"label": jnp.asarray(labels)}, jnp.ones(40))
    )
    expected = top_k_accuracy_score(labels, logits, k=3, labels=np.arange(CLASSES))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^k must be from 1 to the 5 classes, got 6\.$"):
        top_k(6)(jnp.asarray(logits), {"label": jnp.asarray(labels)})


def test_groups_have_their_own_sums():
    logits, labels, mask = examples(1, 30)
    groups = np.arange(30) % 4
    batch = {"label": jnp.asarray(labels), "group": jnp.asarray(groups)}
    shapes = jax.eval_shape(macro_f_score().sums, jnp.asarray(logits), batch)
    metric = grouped_sums(macro_f_score(), shapes, lambda batch: batch["group"], 5)
    total = metric.evaluate(jnp.asarray(logits), batch, jnp.asarray(mask, jnp.float32))
    found = metric.compute(added(metric.init(), total))
    for group in range(4):
        kept = mask & (groups == group)
        expected = f1_score(labels[kept], logits[kept].argmax(-1), average="macro")
        np.testing.assert_allclose(found[group], expected, rtol=1e-6)
    assert np.isnan(found[4])


def shifted(metrics):
    """A model whose variables are added to the images, which are logits already."""
    return Model(
        init=lambda key: Variables(jnp.zeros(()), {}),
        apply=lambda v, batch, **_: (batch["image"] + v.params * jnp.eye(CLASSES)[0], v.mutable),
        loss=lambda outputs, batch: outputs[:, 0],
        metrics=metrics,
        num_classes=CLASSES,
    )


def test_an_evaluation_over_devices_clients_and_seeds_is_the_whole():
    """Thirteen examples on eight devices: most batches are padding."""
    logits, labels, _ = examples(2, 13)
    data = FederatedData.from_arrays(
        {"image": logits, "label": labels}, offsets=np.array([0, 6, 13])
    )
    predictor = single_model(shifted({"macro": macro_f_score()}), lambda state: state)
    shifts = jnp.array([0.0, 1.5])

    def of_seeds(split, axis_name):
        def of_one(shift):
            variables = Variables(shift, {})
            return evaluate(predictor, variables, split, 2, lambda b, k, p: b, axis_name)

        return jax.vmap(of_one)(shifts)

    split = evaluation_split(data)
    mesh = Mesh(np.array(jax.devices()), ("clients",))
    specs = dict(in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    dealt = jax.jit(jax.shard_map(lambda split: of_seeds(split, "clients"), mesh=mesh, **specs))(
        EvaluationSplit(*jax.tree.map(jnp.asarray, split))
    )
    alone = jax.jit(lambda split: of_seeds(split, None))(split)
    for index, shift in enumerate(shifts):
        predicted = (logits + shift * np.eye(CLASSES)[0]).argmax(-1)
        clients = [slice(0, 6), slice(6, 13)]
        score = lambda part, p=predicted: f1_score(labels[part], p[part], average="macro")
        for found in (alone, dealt):
            np.testing.assert_allclose(found["macro"][index], score(slice(None)), rtol=1e-6)
            np.testing.assert_allclose(
                found["macro_per_client"][index], [score(part) for part in clients], rtol=1e-6
            )
    assert alone["macro"][0] != alone["macro"][1]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            SummedMetric(lambda o, b: {"all": o.sum()}, lambda t: t["all"]),
            "sums must have one entry",
        ),
        (SummedMetric(lambda o, b: o, lambda t: t), "compute must return one number, got float32"),
        (SummedMetric(lambda o, b: o, lambda t: (t.sum(), 1)), "compute must return one number"),
    ],
)
def test_wrong_shapes_are_one_line(metric, message):
    logits, labels, _ = examples(0, 4)
    with pytest.raises(ValueError, match=rf"^metrics\['mine'\]'s {message}") as error:
        checked_statistic("mine", metric, jnp.asarray(logits), {"label": jnp.asarray(labels)})
    assert "\n" not in str(error.value)


def test_outputs_of_several_positions_have_no_macro_f_score():
    with pytest.raises(ValueError, match=r"outputs must be \[batch, classes\], got \[2, 3, 4\]"):
        macro_f_score().sums(jnp.zeros((2, 3, 4)), {"label": jnp.zeros((2, 3), jnp.int32)})
