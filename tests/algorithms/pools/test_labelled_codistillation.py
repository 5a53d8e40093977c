"""Codistillation with labelled data (appendix C.4): against NumPy, mixed labels, text, limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quick_compilation import QUICK
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import fed_avg
from fedcodist.algorithms.pools.codistillation import TeachingHyper, codistill
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.config.experiment import build_experiment
from fedcodist.configs import digits_codist
from fedcodist.core import keys
from fedcodist.core.inputs import Examples, Inputs, Round
from fedcodist.core.model import Variables
from fedcodist.data.vocabulary import BOS, EOS
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED, batch_of_step
from fedcodist.run.experiment import Experiment, check_experiment
from fedcodist.run.sources import resident_data
from fedcodist.text.lstm import LSTMLanguageModel
from fedcodist.text.next_token import language_model, next_tokens

COUNT, CLASSES, STEPS, BATCH, RATE = 7, 3, 4, 5, 0.5
# An image tells which example it is, so mixed images tell how their labels are mixed.
IMAGES = 2.0 * np.eye(COUNT)
LABELS = np.array([0, 1, 2, 1, 0, 2, 2], np.int32)
MODEL = softmax_regression(COUNT, CLASSES)
POOLS = {name: Pool(fed_avg(MODEL), np.arange(3), 2) for name in ("small", "large")}
INDICES = np.random.default_rng(2).integers(0, COUNT, (STEPS, BATCH)).astype(np.int32)
SHARES = {"small": 0.3, "large": None}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def starts():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(COUNT, CLASSES)) for name in POOLS}


def teaching_of(shares, interpolation=0.2):
    return {
        name: TeachingHyper(RATE, 1.0, interpolation, 1.5, 2.0, 1.0, share)
        for name, share in shares.items()
    }


def distillation(beta):
    return Distillation(STEPS, BATCH, optax.sgd, mixup_beta=beta)


def codistilled(teaching, beta=0.0, columns=None):
    """The students' parameters, and every step's images, mixed where beta is above 0."""
    columns = {"image": IMAGES, "label": LABELS} if columns is None else columns
    examples = Examples(jax.tree.map(jnp.asarray, columns), jnp.asarray(INDICES))
    root, settings = jax.random.key(0), distillation(beta)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run():
        round = Round(0, root, Inputs({}, {UNLABELLED: examples}))
        begin = {name: Variables({"w": jnp.asarray(w)}, {}) for name, w in starts().items()}
        return codistill(POOLS, begin, round, teaching, settings, num_rounds=3).students

    key = keys.derive(root, "distillation", 0)
    batches = [
        batch_of_step(examples, step, keys.derive(key, step), settings, None)[0]["image"]
        for step in range(STEPS)
    ]
    students = {name: np.asarray(student.params["w"]) for name, student in run().items()}
    return students, list(map(np.asarray, batches))


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_targets_with_labels_are_a_plain_loop(beta):
    found, batches = codistilled(teaching_of(SHARES), beta)
    before = starts()
    for name, other in (("small", "large"), ("large", "small")):
        w = before[name]
        for images in batches:
            target = 0.8 * softmax(images @ before[other] / 2.0)
            target += 0.2 * softmax(images @ before[name] / 1.5)
            if name == "small":
                one_hot = images / 2.0 @ np.eye(CLASSES)[LABELS]
                np.testing.assert_allclose(one_hot.sum(-1), 1)
                target = 0.7 * target + 0.3 * one_hot
            w = w - RATE * images.T @ (softmax(images @ w) - target) / BATCH
        np.testing.assert_allclose(found[name], w, rtol=1e-6)


def test_a_share_of_nothing_is_no_labels():
    nothing, _ = codistilled(teaching_of({"small": 0.0, "large": 0.0}))
    without, _ = codistilled(teaching_of({"small": None, "large": None}))
    for name in POOLS:
        np.testing.assert_allclose(nothing[name], without[name], rtol=1e-12)


def test_a_share_of_all_is_training_on_labels():
    found, batches = codistilled(teaching_of({"small": 1.0, "large": 1.0}))
    for name, w in starts().items():
        for images, indices in zip(batches, INDICES, strict=True):
            one_hot = np.eye(CLASSES)[LABELS[indices]]
            w = w - RATE * images.T @ (softmax(images @ w) - one_hot) / BATCH
        np.testing.assert_allclose(found[name], w, rtol=1e-6)


def test_labels_may_be_one_hot_already():
    one_hot = {"image": IMAGES, "label": np.eye(CLASSES)[LABELS]}
    found, _ = codistilled(teaching_of(SHARES), columns=one_hot)
    expected, _ = codistilled(teaching_of(SHARES))
    np.testing.assert_allclose(found["small"], expected["small"], rtol=1e-12)


def test_text_is_its_own_label():
    """All of the target is the next token: the first loss is the tokens' mean cross-entropy."""
    vocabulary, model = 9, language_model(LSTMLanguageModel(9, 4, 3, 1), 9)
    pools = {name: Pool(fed_avg(model), np.arange(3), 2) for name in ("a", "b")}
    rng = np.random.default_rng(0)
    tokens = np.concatenate(
        [np.full((8, 1), BOS), rng.integers(3, vocabulary, (8, 4)), np.full((8, 1), EOS)], axis=1
    ).astype(np.uint16)
    indices = jnp.arange(8, dtype=jnp.int32).reshape(1, 8)
    examples = Examples({"tokens": jnp.asarray(tokens)}, indices)
    settings = Distillation(1, 8, optax.sgd, "forward", 0.0, next_tokens, "tokens")
    begin = {name: model.init(jax.random.key(i)) for i, name in enumerate(pools)}
    round = Round(0, jax.random.key(0), Inputs({}, {UNLABELLED: examples}))
    result = jax.jit(
        lambda: codistill(pools, begin, round, teaching_of({"a": 1.0, "b": None}), settings, 3),
        compiler_options=QUICK,
    )()
    batch = next_tokens({"tokens": jnp.asarray(tokens)}, jax.random.key(0), jnp.arange(8))
    outputs = model.apply(begin["a"], batch)[0]
    logits = np.asarray(outputs.features @ outputs.kernel + outputs.bias)
    probability = np.take_along_axis(softmax(logits), np.asarray(batch["label"])[..., None], -1)
    np.testing.assert_allclose(result.first_loss["a"], -np.log(probability).mean(), rtol=1e-5)


def build(method=periodic_codistillation, **teaching):
    columns = random_clients((2, 3, 2), COUNT, CLASSES).columns
    hyper = {"small": TeachingHyper(**teaching)}
    settings = distillation(0.0)
    return method(POOLS, columns, COUNT, 3, distillation=settings, teaching=hyper)


def test_shares_out_of_range():
    with pytest.raises(
        ValueError, match=r"teaching\['small'\]\.label_interpolation must be .* 1.5"
    ):
        build(label_interpolation=1.5)


def test_with_labels_a_student_need_have_no_other_teacher_than_itself():
    build(merged_codistillation, interpolation=1.0, label_interpolation=0.5)
    with pytest.raises(ValueError, match="interpolation must be below 1"):
        build(merged_codistillation, interpolation=1.0)


def test_data_without_labels_are_one_line():
    with pytest.raises(
        ValueError, match=r"data set 'unlabelled' must have a column 'label' .*image"
    ):
        codistilled(teaching_of(SHARES), columns={"image": IMAGES})


def test_labels_beyond_the_outputs_are_found_before_anything_compiles():
    data = random_clients((2, 3, 2), COUNT, CLASSES)
    columns = {"image": IMAGES.astype(np.float32), "label": LABELS + 1}
    source = resident_data(data, {UNLABELLED: columns})
    experiment = Experiment(
        build(periodic_codistillation, label_interpolation=0.5), source, {"t": data}, rounds=3
    )
    with pytest.raises(ValueError, match="label"):
        check_experiment(experiment)


@pytest.mark.parametrize("method", ["periodic_codistillation", "merged_codistillation"])
def test_configs_read_labels_where_a_pool_asks_for_them(method):
    config = digits_codist.get_config(method)
    assert set(build_experiment(config).data.data_sets["unlabelled"]) == {"image"}
    config.pools.large.teaching.label_interpolation = 0.25
    with jax.enable_x64(False):
        experiment = build_experiment(config)
        assert set(experiment.data.data_sets["unlabelled"]) == {"image", "label"}
        check_experiment(experiment)
    config.pools.large.teaching.label_interpolation = 2.0
    with pytest.raises(ValueError, match=r"pools\.large\.teaching\.label_interpolation must be"):
        build_experiment(config)
