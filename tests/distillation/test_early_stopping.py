"""A distillation that stops early is the plain one up to the step at which a plain loop stops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_model import linear_model
from quick_compilation import QUICK

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Examples
from fedcodist.core.model import Variables
from fedcodist.distillation.divergences import kl_divergence, softened, softened_target
from fedcodist.distillation.early_stopping import EarlyStopping, distill_until
from fedcodist.distillation.loop import distill, frozen
from fedcodist.distillation.settings import Distillation
from fedcodist.models.digits import MLP

STEPS, EVERY, BATCH = 24, 3, 4
NAMES = ("a", "b")
MODEL = from_flax_linen(MLP(hidden=(3,), classes=3), jnp.zeros((1, 6)))
# Accuracies by validation; without a further improvement patience runs out.
SCRIPTS = {
    "rises": [1, 2, 3, 4, 5, 6, 7, 8],
    "first is best": [9, 1, 2, 3, 4, 5, 6, 7],
    "ties": [1, 4, 4, 4, 4, 4, 4, 4],
    "late": [3, 1, 1, 1, 1, 9, 9, 9],
}


def rows(steps):
    images = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    return Examples(
        {"image": jnp.asarray(images)}, jnp.arange(steps * BATCH).reshape(steps, BATCH) % 9
    )


@functools.cache
def students():
    with jax.ensure_compile_time_eval():
        return {name: MODEL.init(jax.random.key(index)) for index, name in enumerate(NAMES)}


def arguments(steps, names=NAMES):
    start = students()
    return dict(
        models=dict.fromkeys(names, MODEL),
        students={name: start[name] for name in names},
        teachers={name: frozen(MODEL, start[name]) for name in NAMES},
        targets=lambda student, logits: softened_target(
            logits["b" if student == "a" else "a"], 2.0
        ),
        unlabelled=rows(steps),
        key=jax.random.key(5),
        learning_rates=dict.fromkeys(names, 0.05),
        settings=Distillation(steps, BATCH, lambda rate: optax.adam(rate, eps=1e-3), mixup_beta=0),
    )


@functools.cache
def after(steps):
    run = jax.jit(lambda: distill(**arguments(steps)).students, compiler_options=QUICK)
    return jax.tree.map(np.asarray, run())


def scripted(scripts):
    """Accuracies from the scripts: the bias of the output layer tells how many steps were made."""
    made = {
        name: jnp.asarray([np.abs(leaf(after(n)[name])).sum() for n in range(0, STEPS + 1, EVERY)])
        for name in NAMES
    }

    def accuracy(trained):
        where = {
            n: jnp.argmin(jnp.abs(made[n] - jnp.abs(leaf(v)).sum())) for n, v in trained.items()
        }
        return {
            n: jnp.asarray([0.0, *SCRIPTS[scripts[n]]], jnp.float32)[at] for n, at in where.items()
        }

    return accuracy


def leaf(variables):
    return variables.params["Dense_1"]["kernel"]


def plain(script, patience, or_start):
    """(steps of the best, steps made) of one student, by a loop."""
    best, best_at, done = (0 if or_start else -np.inf), 0, 0
    while done < STEPS and done - best_at < patience:
        done += EVERY
        if SCRIPTS[script][done // EVERY - 1] > best:
            best, best_at = SCRIPTS[script][done // EVERY - 1], done
    return best_at, done


@pytest.mark.parametrize(
    "patience", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (6, 12))]
)
@pytest.mark.parametrize(
    "scripts", [("rises", "late"), ("ties", "first is best"), ("late", "ties")]
)
def test_each_student_is_cut_off_where_a_loop_would(scripts, patience):
    scripts = dict(zip(NAMES, scripts, strict=True))
    stopping = EarlyStopping(scripted(scripts), EVERY, patience)
    run = lambda: distill_until(stopping, **arguments(STEPS))
    stopped = jax.jit(run, compiler_options=QUICK)()
    made = []
    for name in NAMES:
        best_at, done = plain(scripts[name], patience, False)
        made.append(done)
        jax.tree.map(
            lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5),
            stopped.students[name],
            after(best_at)[name],
        )
        assert stopped.accuracy[name] == SCRIPTS[scripts[name]][best_at // EVERY - 1]
    assert stopped.steps == max(made)


def test_a_student_that_is_done_keeps_its_best_while_another_goes_on():
    """b is done at step 6: its later models are better, but a loop of its own would not make them."""
    by_validation = {"a": [1, 2, 3, 4, 5, 6, 7, 8], "b": [3, 2, 1, 4, 9, 9, 9, 9]}
    model = linear_model(2, 3)
    # Every step adds one to every weight, so a student's weights tell how many steps it has made.
    counting = lambda rate: optax.stateless(lambda updates, _: jax.tree.map(jnp.ones_like, updates))

    def accuracy(trained):
        at = {name: values.params["w"][0, 0].astype(int) for name, values in trained.items()}
        return {n: jnp.float32(jnp.array(by_validation[n])[at[n] // EVERY - 1]) for n in trained}

    start = Variables({"w": jnp.zeros((2, 3))}, {})
    stopped = distill_until(
        EarlyStopping(accuracy, EVERY, patience=EVERY),
        models=dict.fromkeys(NAMES, model),
        students=dict.fromkeys(NAMES, start),
        teachers={"teacher": frozen(model, start)},
        targets=lambda student, logits: softened_target(logits["teacher"], 1.0),
        unlabelled=Examples({"image": jnp.ones((9, 2))}, jnp.zeros((STEPS, BATCH), jnp.int32)),
        key=jax.random.key(0),
        learning_rates=dict.fromkeys(NAMES, 1.0),
        settings=Distillation(STEPS, BATCH, counting, mixup_beta=0),
    )
    steps = {name: int(values.params["w"][0, 0]) for name, values in stopped.students.items()}
    assert steps == {"a": STEPS, "b": EVERY} and stopped.steps == STEPS
    assert {name: int(value) for name, value in stopped.accuracy.items()} == {"a": 8, "b": 3}


@pytest.mark.parametrize("or_start", [False, True])
def test_accuracies_may_be_of_64_bits(or_start):
    accuracy = lambda trained: {name: jnp.float64(0.5) for name in trained}
    with jax.enable_x64(True):
        stopping = EarlyStopping(accuracy, EVERY, 6, or_start)
        found = jax.eval_shape(lambda: distill_until(stopping, **arguments(STEPS)))
    assert all(of.dtype == jnp.float32 for of in found.accuracy.values())


def test_the_start_may_be_the_best():
    start = students()
    worse = lambda trained: {
        n: -jnp.abs(leaf(v) - leaf(start[n])).sum() for n, v in trained.items()
    }
    for or_start in (True, False):
        stopping = EarlyStopping(worse, EVERY, EVERY, or_start)
        stopped = distill_until(stopping, **arguments(STEPS, ("a",)))
        moved = np.abs(leaf(stopped.students["a"]) - leaf(start["a"])).sum()
        assert (moved == 0) == or_start
        assert stopped.steps == (EVERY if or_start else 2 * EVERY)


def test_softening_keeps_gradients_as_large():
    """Hinton's limit: with the factor the gradient tends to the centred difference over classes."""
    generator = np.random.default_rng(1)
    student, teacher = jnp.asarray(generator.normal(size=(2, 5, 3)))
    for scaled, limit in ((True, 1.0), (False, 0.0)):
        temperature = 1e2
        divergence = softened(kl_divergence("forward"), temperature, scaled)
        gradient = jax.grad(
            lambda z, divergence=divergence: jnp.sum(
                divergence(z, softened_target(teacher, temperature))
            )
        )(student)
        centre = lambda z: z - z.mean(-1, keepdims=True)
        expected = limit * (centre(student) - centre(teacher)) / 3
        np.testing.assert_allclose(gradient, expected, atol=0.02)
