"""Targets, divergences, and the loop in which students learn from frozen models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from quick_compilation import QUICK

from fedcodist.algorithms.pools.codistillation import codistillation_target
from fedcodist.core import keys
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Examples
from fedcodist.core.model import Model, Variables
from fedcodist.core.readout import Readout
from fedcodist.data import augmentation
from fedcodist.distillation.divergences import kl_divergence
from fedcodist.distillation.loop import distill
from fedcodist.distillation.loop import frozen as as_teacher
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import batch_of_step, batches_of_steps
from fedcodist.distillation.weight_averaging import WeightAveraging, distill_averaged
from fedcodist.models.digits import MLP

KEY = jax.random.key(4)
SEEDS = st.integers(0, 2**31 - 1)
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "reverse"])


def _random_logits(seed, scale=3.0, examples=4):
    return (scale * np.random.default_rng(seed).normal(size=(examples, 3))).astype(np.float32)


def _probabilities(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True), dtype=np.float64)
    return exponentials / exponentials.sum(-1, keepdims=True)


# Divergences.


@functools.cache
def _divergence(direction):
    return jax.jit(kl_divergence(direction))


@DIRECTIONS
@settings(max_examples=50)
@given(SEEDS, SEEDS, st.floats(0.1, 20))
def test_divergences_are_the_formula_and_not_negative(direction, seed, other, scale):
    logits, target = _random_logits(seed, scale), _probabilities(_random_logits(other))
    student = _probabilities(logits)
    first, second = (target, student) if direction == "forward" else (student, target)
    divergence = np.asarray(_divergence(direction)(logits, target.astype(np.float32)))
    # Student probabilities may underflow; 0 log 0 is 0.
    terms = np.where(first > 0, first * (np.log(np.maximum(first, 1e-300)) - np.log(second)), 0)
    np.testing.assert_allclose(divergence, terms.sum(-1), rtol=1e-3, atol=1e-5)
    assert np.all(divergence >= -1e-6)


@DIRECTIONS
@settings(max_examples=30)
@given(SEEDS)
def test_divergence_is_zero_only_between_equals(direction, seed):
    # Within these bounds no class is so unlikely that moving its logit is lost in float32.
    logits = np.clip(_random_logits(seed), -3, 3)
    same = _divergence(direction)(logits, jax.nn.softmax(logits))
    np.testing.assert_allclose(same, np.zeros(4), atol=1e-6)
    moved = logits + np.array([0.5, 0, 0], np.float32)
    assert np.all(_divergence(direction)(moved, jax.nn.softmax(logits)) > 1e-7)


@DIRECTIONS
@settings(max_examples=30)
@given(SEEDS, st.floats(-50, 50, width=32))
def test_a_constant_added_to_logits_changes_nothing(direction, seed, constant):
    logits, target = _random_logits(seed), jax.nn.softmax(_random_logits(seed + 1))
    np.testing.assert_allclose(
        _divergence(direction)(logits + np.float32(constant), target),
        _divergence(direction)(logits, target),
        rtol=1e-3,
        atol=1e-4,
    )


@DIRECTIONS
def test_targets_of_exact_zeros_are_finite(direction):
    value, gradient = jax.value_and_grad(
        lambda logits: jnp.sum(kl_divergence(direction)(logits, jnp.array([[1.0, 0.0, 0.0]])))
    )(jnp.array([[0.5, -1.0, 2.0]]))
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))


@DIRECTIONS
@pytest.mark.parametrize("gap", [50.0, 110.0, 1000.0])
def test_students_of_exact_zeros_have_finite_gradients(direction, gap):
    """Where a student is so sure that its other probabilities are 0 in float32."""
    logits, target = jnp.array([[0.0, gap, -3.0]]), jnp.array([[0.2, 0.5, 0.3]])
    value, gradient = jax.value_and_grad(
        lambda logits: jnp.sum(kl_divergence(direction)(logits, target))
    )(logits)
    expected = -np.log(0.5) if direction == "reverse" else None
    assert np.isfinite(value)
    assert expected is None or value == pytest.approx(expected, rel=1e-5)
    assert np.all(np.isfinite(gradient))


def test_the_forward_gradient_is_prediction_minus_target():
    logits, target = _random_logits(0), jax.nn.softmax(_random_logits(1))
    gradient = jax.grad(lambda z: jnp.sum(kl_divergence("forward")(z, target)))(logits)
    np.testing.assert_allclose(gradient, jax.nn.softmax(logits) - target, atol=1e-6)


def test_unknown_direction():
    with pytest.raises(ValueError, match="direction must be 'forward' or 'reverse', got 'up'"):
        kl_divergence("up")


# Targets.


@jax.jit
def _two_teacher_target(first, second, initial, temperatures, weights, interpolation, own):
    return codistillation_target(
        {"a": first, "b": second},
        {"a": temperatures[0], "b": temperatures[1]},
        {"a": weights[0], "b": weights[1]},
        initial,
        interpolation,
        own,
    )


@settings(max_examples=50)
@given(
    SEEDS,
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
    st.tuples(st.floats(0.01, 5), st.floats(0, 5)),
    st.floats(0, 1),
    st.floats(0.1, 10),
)
def test_targets_are_the_formula(seed, temperatures, weights, interpolation, own):
    first, second, initial = (_random_logits(seed + i) for i in range(3))
    target = _two_teacher_target(first, second, initial, temperatures, weights, interpolation, own)
    a, b = (
        _probabilities(logits / temperature)
        for logits, temperature in zip((first, second), temperatures, strict=True)
    )
    taught = (weights[0] * a + weights[1] * b) / sum(weights)
    expected = (1 - interpolation) * taught + interpolation * _probabilities(initial / own)
    np.testing.assert_allclose(target, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(np.sum(target, -1), np.ones(4), rtol=1e-5)


@settings(max_examples=20)
@given(SEEDS, st.floats(-30, 30, width=32))
def test_targets_do_not_see_a_constant_added_to_logits(seed, constant):
    first, second, initial = (_random_logits(seed + i) for i in range(3))
    settings_ = ((2.0, 0.5), (1.0, 3.0), 0.3, 2.0)
    shifted = (logits + np.float32(constant) for logits in (first, second, initial))
    np.testing.assert_allclose(
        _two_teacher_target(*shifted, *settings_),
        _two_teacher_target(first, second, initial, *settings_),
        atol=1e-4,
    )


def _one_teacher_target(logits, temperature, interpolation=0.0, initial=None):
    initial = np.zeros_like(logits) if initial is None else initial
    return codistillation_target(
        {"a": logits}, {"a": temperature}, {"a": 0.25}, initial, interpolation
    )


def test_high_temperatures_give_uniform_targets_and_low_ones_the_best_class():
    logits = _random_logits(2, 1.0)
    np.testing.assert_allclose(_one_teacher_target(logits, 1e6), np.full((4, 3), 1 / 3), atol=1e-5)
    one_hot = np.eye(3)[logits.argmax(-1)]
    np.testing.assert_allclose(_one_teacher_target(logits, 1e-4), one_hot, atol=1e-6)


def test_interpolation_goes_from_the_teacher_to_the_student_itself():
    logits, initial = _random_logits(0), _random_logits(1)
    teacher, own = _probabilities(logits / 2), _probabilities(initial)
    for share in (0.0, 0.25, 1.0):
        np.testing.assert_allclose(
            _one_teacher_target(logits, 2.0, share, initial),
            (1 - share) * teacher + share * own,
            atol=1e-6,
        )


def test_shapes_of_teachers_must_agree():
    with pytest.raises(AssertionError):
        _one_teacher_target(_random_logits(0), 1.0, initial=_random_logits(1, examples=2))


# The loop.

MODEL = from_flax_linen(MLP(hidden=(5,), classes=3), np.zeros((1, 6), np.float32))
MODELS = {"a": MODEL, "b": MODEL}
STEPS, BATCH = 3, 8
# Optimizer, learning rate, and how far rounding may move a student whose gradient is zero. Near a
# zero gradient Adam is descent of rate / epsilon: a ratio far above 1 would let rounding grow.
FIXED_POINT = (("sgd", 1.0, 1e-5), ("adam", 1e-3, 1e-5))


@functools.cache
def _two_models():
    init = jax.jit(MODEL.init, compiler_options=QUICK)
    return {"a": init(jax.random.key(0)), "b": init(jax.random.key(1))}


def _unlabelled():
    images = np.random.default_rng(3).normal(size=(11, 6)).astype(np.float32)
    indices = np.arange(STEPS * BATCH).reshape(STEPS, BATCH) % 11
    return Examples({"image": jnp.asarray(images)}, jnp.asarray(indices))


@functools.cache
def _distillation(optimizer, learners=("a", "b"), direction="forward"):
    """Returns (students, frozen, interpolation, temperature) -> Distilled, one program."""
    optimizers = {"sgd": optax.sgd, "adam": lambda rate: optax.adam(rate, eps=1e-3)}
    settings_ = Distillation(STEPS, BATCH, optimizers[optimizer], direction, mixup_beta=0)

    def run(students, frozen, interpolation, temperature, rate):
        def targets(student, logits):
            (teacher,) = set(frozen) - {student}
            return codistillation_target(
                {teacher: logits[teacher]},
                {teacher: temperature},
                {teacher: 1.0},
                logits[student],
                interpolation,
            )

        return distill(
            MODELS,
            {name: students[name] for name in learners},
            {name: as_teacher(MODELS[name], values) for name, values in frozen.items()},
            targets,
            _unlabelled(),
            KEY,
            dict.fromkeys(learners, rate),
            settings_,
        )

    return jax.jit(run, compiler_options=QUICK)


def _length(left, right):
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, left, right)))


def test_students_approach_their_teacher():
    start = _two_models()
    result = _distillation("sgd")(start, start, 0.0, 1.0, 0.3)
    for name in start:
        assert result.first_loss[name] > 0.05
        assert _length(result.students[name].params, start[name].params) > 0.01
    logits = {name: MODEL.apply(values, _unlabelled().columns)[0] for name, values in start.items()}
    trained = MODEL.apply(result.students["a"], _unlabelled().columns)[0]
    divergence = kl_divergence("forward")
    target = jax.nn.softmax(logits["b"])
    assert jnp.mean(divergence(trained, target)) < jnp.mean(divergence(logits["a"], target))


@DIRECTIONS
def test_first_loss_is_the_divergence_before_any_step(direction):
    """Forward is KL(target || student), reverse KL(student || target)."""
    start = _two_models()
    result = _distillation("sgd", direction=direction)(start, start, 0.2, 2.0, 0.3)
    batch = {"image": _unlabelled().columns["image"][np.arange(BATCH)]}
    a, b = (np.asarray(MODEL.apply(start[name], batch)[0]) for name in ("a", "b"))
    target = 0.8 * _probabilities(b / 2) + 0.2 * _probabilities(a)
    student = _probabilities(a)
    first, second = (target, student) if direction == "forward" else (student, target)
    expected = np.mean(np.sum(first * np.log(first / second), -1))
    np.testing.assert_allclose(result.first_loss["a"], expected, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 7.0])
def test_a_student_that_teaches_only_itself_stays(temperature):
    start = _two_models()
    for optimizer, rate, allowed in FIXED_POINT:
        result = _distillation(optimizer)(start, start, 1.0, temperature, rate)
        for name in start:
            assert _length(result.students[name].params, start[name].params) < allowed
            np.testing.assert_allclose(result.first_loss[name], 0, atol=1e-6)


def test_equal_models_do_not_move_each_other():
    same = {"a": _two_models()["a"], "b": _two_models()["a"]}
    for optimizer, rate, allowed in FIXED_POINT:
        result = _distillation(optimizer)(same, same, 0.3, 1.0, rate)
        for name in same:
            assert _length(result.students[name].params, same[name].params) < allowed


def test_equal_models_at_another_temperature_do():
    """So the test above can fail."""
    same = {"a": _two_models()["a"], "b": _two_models()["a"]}
    result = _distillation("sgd")(same, same, 0.3, 2.0, 1.0)
    assert _length(result.students["a"].params, same["a"].params) > 0.1


def test_teachers_are_frozen_while_they_learn_themselves():
    """A student's result does not depend on whether its teacher is a student too."""
    start = _two_models()
    before = jax.tree.map(np.array, start)
    both = _distillation("sgd")(start, start, 0.2, 1.0, 0.5)
    alone = _distillation("sgd", learners=("a",))(start, start, 0.2, 1.0, 0.5)
    assert set(alone.students) == {"a"}
    for got, want in zip(
        jax.tree.leaves(both.students["a"]), jax.tree.leaves(alone.students["a"]), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert _length(both.students["b"].params, start["b"].params) > 0.01
    jax.tree.map(np.testing.assert_array_equal, start, before)


def test_teachers_get_no_gradient():
    start = _two_models()
    run = _distillation("sgd").__wrapped__

    def outcome(frozen, students):
        result = run(students, frozen, 0.2, 1.0, 0.5)
        return optax.tree.sum(result.students) + sum(result.last_loss.values())

    gradients = jax.jit(jax.grad(outcome, argnums=(0, 1)), compiler_options=QUICK)
    by_teachers, by_students = gradients(start, start)
    assert float(optax.tree.norm(by_teachers)) == 0
    assert float(optax.tree.norm(by_students)) > 0.1


def test_no_steps_change_nothing():
    start = _two_models()
    none = Examples({"image": np.zeros((2, 6), np.float32)}, np.zeros((0, BATCH), np.int32))
    settings_ = Distillation(steps=0, batch_size=BATCH)
    result = distill(MODELS, start, {}, None, none, KEY, {"a": 0.1, "b": 0.1}, settings_)
    jax.tree.map(np.testing.assert_array_equal, result.students, start)
    # A loss of 0 would be that of students who agree with their targets.
    for losses in (result.first_loss, result.last_loss):
        assert set(losses) == set(start)
        assert all(np.isnan(loss) for loss in losses.values())


# A batch dealt to devices.


@pytest.mark.parametrize(
    "size", [pytest.param(16, marks=pytest.mark.slow), 10, pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_sharded_batch_is_the_slice_of_the_whole(size):
    images = np.random.default_rng(0).normal(size=(20, 2, 3, 1)).astype(np.float32)
    indices = np.random.default_rng(1).integers(0, 20, (2, size))
    unlabelled = Examples({"image": jnp.asarray(images)}, jnp.asarray(indices))
    preprocess = augmentation.image_preprocess(augmentation.random_axis_flip)
    settings_ = Distillation(steps=2, batch_size=size, preprocess=preprocess)

    def part(axis_name):
        batch, mask = batch_of_step(unlabelled, 1, KEY, settings_, axis_name)
        return batch["image"], mask

    mesh = Mesh(np.array(jax.devices()), ("clients",))
    sharded = jax.jit(
        jax.shard_map(
            lambda: part("clients"), mesh=mesh, in_specs=(), out_specs=PartitionSpec("clients")
        ),
        compiler_options=QUICK,
    )
    whole, _ = jax.jit(lambda: part(None), compiler_options=QUICK)()
    parts, masks = sharded()
    real = np.asarray(masks) == 1
    assert len(jax.devices()) == 8
    assert real.sum() == size
    np.testing.assert_allclose(np.asarray(parts)[real], whole, rtol=1e-6)


def _distilled_outputs(outputs, **settings):
    """Of a network with these outputs, which teaches itself."""
    model = MODEL._replace(apply=lambda variables, batch, **_: (outputs(variables, batch), {}))
    variables = {"a": _two_models()["a"]}
    return distill(
        {"a": model},
        variables,
        {"a": as_teacher(model, variables["a"])},
        lambda student, logits: jax.nn.softmax(logits["a"]),
        _unlabelled(),
        KEY,
        {"a": 0.1},
        Distillation(STEPS, BATCH, mixup_beta=0)._replace(**settings),
    )


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_steps_have_no_loop_whose_length_is_unknown():
    """At each turn of such a loop a GPU waits for the host."""
    dense = lambda variables, batch: batch["image"] @ jnp.ones((6, 3)) + variables.params[0]
    model = MODEL._replace(apply=lambda *inputs, **_: (dense(*inputs), {}))
    start = {"a": Variables((jnp.zeros(3),), {})}

    def mixed():
        settings_ = Distillation(STEPS, BATCH, mixup_beta=2.0)
        teachers = {"a": as_teacher(model, start["a"])}
        target = lambda student, logits: jax.nn.softmax(logits["a"])
        return distill(
            {"a": model}, start, teachers, target, _unlabelled(), KEY, {"a": 0.1}, settings_
        )

    everything = list(_equations(jax.make_jaxpr(mixed)().jaxpr))
    assert any(equation.primitive.name == "while" for equation in everything)  # the draws
    (steps,) = (e for e in everything if e.primitive.name == "scan" and e.params["length"] == STEPS)
    inside = {each.primitive.name for each in _equations(steps.params["jaxpr"].jaxpr)}
    assert "while" not in inside and "dot_general" in inside


@given(SEEDS)
@settings(max_examples=10)
def test_what_mixup_draws_at_once_is_what_each_step_would_draw(seed):
    settings_ = Distillation(STEPS, BATCH, mixup_beta=2.0)
    key = jax.random.key(seed)
    at_once = batches_of_steps(_unlabelled(), key, settings_, None)
    for index in range(STEPS):
        own = batch_of_step(_unlabelled(), index, keys.derive(key, index), settings_, None)
        jax.tree.map(np.testing.assert_array_equal, at_once(index), own)


def test_the_loss_of_a_text_is_the_mean_over_positions_that_count():
    """One step for sentences of 3, 1 and 2 words, of which no logits of the whole batch exist."""
    draws = np.random.default_rng(0)
    features = jnp.asarray(draws.normal(size=(3, 4, 2)), jnp.float32)
    counts = jnp.arange(4) < jnp.array([[3], [1], [2]])

    def apply(variables, batch, **_):
        weights = batch["counts"].astype(jnp.float32)
        return Readout(batch["image"], variables.params["w"], jnp.zeros(5), weights), {}

    model = Model(None, apply, None, {}, 5)
    student, teacher = (
        Variables({"w": jnp.asarray(draws.normal(size=(2, 5)), jnp.float32)}, {}) for _ in range(2)
    )
    run = lambda: distill(
        {"student": model},
        {"student": student},
        {"teacher": as_teacher(model, teacher)},
        lambda name, logits: jax.nn.softmax(logits["teacher"]),
        Examples({"image": features, "counts": counts}, jnp.arange(3)[None]),
        KEY,
        {"student": 0.5},
        Distillation(1, 3, optax.sgd, mixup_beta=0),
    )

    def mean(w):
        targets = jax.nn.softmax(features @ teacher.params["w"])
        return jnp.sum(kl_divergence("forward")(features @ w, targets) * counts) / 6

    distilled, (loss, slope) = jax.jit(lambda w: (run(), jax.value_and_grad(mean)(w)))(
        student.params["w"]
    )
    np.testing.assert_allclose(distilled.first_loss["student"], loss, rtol=1e-5)
    moved = student.params["w"] - 0.5 * slope
    np.testing.assert_allclose(distilled.students["student"].params["w"], moved, rtol=1e-5)


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        # They would be averaged wrongly, or fit by chance where their number is that of the examples.
        (jnp.zeros((BATCH, BATCH, 3)), r"float32\["),
        ({"logits": jnp.zeros((BATCH, 3))}, "a dict of 1"),
    ],
    ids=["of_every_position", "dictionary"],
)
def test_outputs_that_are_no_logits_are_refused(outputs, kind):
    message = rf"'a' must return logits \[batch, classes\].* got {kind}"
    with pytest.raises(ValueError, match=message) as raised:
        _distilled_outputs(lambda variables, batch: outputs)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("without", ["students", "teachers"])
def test_a_distillation_needs_students_and_teachers(without):
    models = {"students": {"a": None}, "teachers": {"a": lambda batch: batch["image"]}, without: {}}
    settings_ = Distillation(STEPS, BATCH)
    with pytest.raises(ValueError, match=f"{without} must name at least one, got none"):
        distill(
            MODELS,
            targets=lambda student, logits: jax.nn.softmax(logits["a"]),
            unlabelled=_unlabelled(),
            key=KEY,
            learning_rates={"a": 0.1},
            settings=settings_,
            **models,
        )


def test_mixup_names_its_inputs():
    message = r"distillation.inputs must be one of \['image'\] for mixup, got 'x'"
    with pytest.raises(ValueError, match=message):
        _distilled_outputs(lambda variables, batch: 0.0, mixup_beta=2.0, inputs="x")


def test_mixup_of_a_column_that_the_network_does_not_read_is_refused():
    """It would change nothing, and nobody would know."""
    model = from_flax_linen(MLP((4,), classes=3), jnp.zeros((1, 6)), inputs="pixels")
    both = {name: jnp.zeros((7, 6)) for name in ("image", "pixels")}
    indices = jnp.zeros((STEPS, BATCH), jnp.int32)

    def students(inputs, mixup_beta):
        start = {"a": model.init(KEY)}
        return distill(
            {"a": model},
            start,
            {"a": as_teacher(model, start["a"])},
            lambda student, logits: jax.nn.softmax(logits["a"]),
            Examples(both, indices),
            KEY,
            {"a": 0.1},
            Distillation(STEPS, BATCH, mixup_beta=mixup_beta, inputs=inputs),
        ).students

    jax.eval_shape(lambda: students("pixels", 2.0))
    del both["pixels"]
    message = r"must have the column 'pixels', which mixup mixes .* they have \['image'\]"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: students("pixels", 2.0))
    both["pixels"] = both["image"]
    jax.eval_shape(lambda: students("image", 0.0))
    message = (
        r"distillation.inputs must be one of \['pixels'\] for mixup, got 'image': the model of 'a'"
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: students("image", 2.0))


@pytest.mark.parametrize(
    "train", [distill, functools.partial(distill_averaged, WeightAveraging(1, 1), 5)]
)
@pytest.mark.parametrize("synchronised", [False, True])
def test_a_device_without_real_examples_does_not_spread_what_its_network_returns(
    synchronised, train
):
    """Batch statistics of padding alone are 0 / 0; here they make the whole output NaN.

    Those of all devices together are the same on each, with examples or without.
    """

    def centred(variables, batch, *, train=False, key=None, mask=None, axis_name=None):
        images = batch["image"]
        if not train:
            return images @ variables.params, variables.mutable
        sums = jnp.sum(images * mask[:, None], 0), jnp.sum(mask)
        total, count = jax.lax.psum(sums, axis_name) if synchronised and axis_name else sums
        mean = total / count
        return (images - mean) @ variables.params, {"mean": mean}

    model = MODEL._replace(apply=centred)
    start = Variables(jnp.ones((2, 3)) * jnp.arange(3.0), {"mean": jnp.zeros(2)})
    images = jax.random.normal(KEY, (5, 2))
    indices = jnp.arange(5)[None]

    def trained(axis_name):
        return train(
            models={"student": model},
            students={"student": start},
            teachers={"teacher": lambda batch: batch["image"] @ jnp.eye(2, 3)},
            targets=lambda name, outputs: jax.nn.softmax(outputs["teacher"]),
            unlabelled=Examples({"image": images}, indices),
            key=KEY,
            learning_rates={"student": 0.1},
            settings=Distillation(1, 5, optax.sgd, mixup_beta=0),
            axis_name=axis_name,
        )

    devices = 4  # two examples for each but the third, and none for the fourth
    mesh = Mesh(np.array(jax.devices()[:devices]), ("clients",))
    on_each = jax.jit(
        jax.shard_map(
            lambda: trained("clients"),
            mesh=mesh,
            in_specs=(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )()
    assert np.isfinite(on_each.students["student"].params).all()
    parts = [images] if synchronised else [images[:2], images[2:4], images[4:]]
    expected = np.mean([part.mean(0) for part in parts], axis=0)
    np.testing.assert_allclose(on_each.students["student"].mutable["mean"], expected, rtol=1e-5)
    assert np.isfinite(on_each.last_loss["student"])
