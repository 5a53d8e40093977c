"""The NumPy reference is itself checked: gradients, optimizers, the algorithms' identities."""

import dataclasses
import itertools

import codistillation_reference as reference
import numpy as np
import pytest
from codistillation_reference import ClientRound, PoolSettings, RoundInputs

SIZES = {"small": (5, 4, 3), "large": (5, 7, 6, 3)}
BASE = PoolSettings(
    client_learning_rate=0.3,
    server_learning_rate=0.05,
    distillation_learning_rate=0.02,
    self_teacher_weight=0.2,
)


def test_cross_entropy_value_and_gradient():
    model, inputs, labels, _ = _model_and_batch(0)
    loss, gradient = reference.cross_entropy(model, inputs, labels)
    probabilities = reference.softmax(reference.forward(model, inputs))
    expected = -sum(np.log(probabilities[i, label]) for i, label in enumerate(labels)) / len(labels)
    assert loss == pytest.approx(expected, rel=1e-12)
    _assert_gradient(lambda p: reference.cross_entropy(p, inputs, labels)[0], model, gradient)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_kl_value_and_gradient(direction):
    model, inputs, _, target = _model_and_batch(1)
    loss, gradient = reference.kl_divergence(model, inputs, target, direction)
    p = reference.softmax(reference.forward(model, inputs))
    first, second = (target, p) if direction == "forward" else (p, target)
    assert loss == pytest.approx(np.sum(first * np.log(first / second)) / len(inputs), rel=1e-12)
    assert loss > 0
    _assert_gradient(
        lambda q: reference.kl_divergence(q, inputs, target, direction)[0], model, gradient
    )


def test_adam_matches_a_hand_computation():
    # Gradients 2 then -1, beta1 = 0.9, beta2 = 0.999, epsilon = 1e-5, rate 0.1.
    # Step 1: m_hat = 2, v_hat = 4, step 0.1 * 2 / (2 + 1e-5) = 0.0999995000025.
    # Step 2: m = 0.08, m_hat = 0.08 / 0.19; v = 0.004996, v_hat = 0.004996 / 0.001999,
    # step 0.1 * 0.42105263 / (1.58091143 + 1e-5) = 0.0266334...
    parameters = _scalar(1.0)
    state = reference.adam_init(parameters)
    parameters, state = reference.adam_step(parameters, _scalar(2.0), state, 0.1)
    assert parameters[0][0][0, 0] == pytest.approx(1 - 0.0999995000025, abs=1e-12)
    parameters, state = reference.adam_step(parameters, _scalar(-1.0), state, 0.1)
    second = 0.1 * (0.08 / 0.19) / ((0.004996 / 0.001999) ** 0.5 + 1e-5)
    assert parameters[0][0][0, 0] == pytest.approx(1 - 0.0999995000025 - second, abs=1e-12)
    assert state.steps == 2
    assert state.second_moment[0][1][0] == pytest.approx(0.004996, abs=1e-15)


def test_pseudo_gradient_of_one_linear_step_is_the_example_weighted_gradient():
    rng = np.random.default_rng(2)
    model = _random_model((5, 3), rng)
    clients = [_client(rng, [4]), _client(rng, [7])]
    g = reference.pseudo_gradient(model, clients, BASE)
    inputs = np.concatenate([client.batches[0][0] for client in clients])
    labels = np.concatenate([client.batches[0][1] for client in clients])
    _, pooled = reference.cross_entropy(model, inputs, labels)
    _assert_close(g, [(0.3 * kernel, 0.3 * bias) for kernel, bias in pooled])


def test_learning_rates_over_rounds():
    assert [reference.server_learning_rate(2.0, t, 4) for t in range(4)] == [2.0, 1.5, 1.0, 0.5]
    rates = [reference.distillation_learning_rate(2.0, 0.5, t, 4) for t in range(4)]
    assert rates == [2.0, 1.75, 1.5, 1.25]


def test_target_of_two_teachers():
    rng = np.random.default_rng(3)
    models = [_random_model(SIZES["small"], rng) for _ in range(3)]
    inputs = rng.normal(size=(4, 5))
    teachers = [reference.Teacher(models[0], 0.75, 2.0), reference.Teacher(models[1], 0.25, 0.5)]
    target = reference.target_distribution(inputs, teachers, models[2], 0.1, 4.0)
    for i in range(len(inputs)):
        exps = [
            np.exp(reference.forward(model, inputs[i : i + 1])[0] / temperature)
            for model, temperature in zip(models, (2.0, 0.5, 4.0), strict=True)
        ]
        first, second, own = (e / e.sum() for e in exps)
        np.testing.assert_allclose(
            target[i], 0.9 * (0.75 * first + 0.25 * second) + 0.1 * own, rtol=1e-12
        )


def test_second_distillation_step_still_looks_at_the_student_init():
    rng = np.random.default_rng(12)
    start, teacher = (_random_model(SIZES["small"], rng) for _ in range(2))
    batches = [rng.normal(size=(4, 5)) for _ in range(2)]
    teachers = [reference.Teacher(teacher, 1.0, 2.0)]
    settings = dataclasses.replace(BASE, self_teacher_weight=0.5, self_teacher_temperature=3.0)
    first = reference.distill(start, teachers, batches[:1], settings, 0.1)
    both = reference.distill(start, teachers, batches, settings, 0.1)
    adam = reference.adam_init(start)
    stepped = start
    for batch in batches:
        target = 0.5 * reference.softmax(reference.forward(teacher, batch) / 2.0)
        target += 0.5 * reference.softmax(reference.forward(start, batch) / 3.0)
        _, gradient = reference.kl_divergence(stepped, batch, target)
        stepped, adam = reference.adam_step(stepped, gradient, adam, 0.1)
    _assert_close(both, stepped)
    assert _distance(both, first) > 1e-3


def test_teacher_weights():
    pools = ["a", "b", "c"]
    assert reference.teacher_weights("a", pools, BASE) == {"b": 0.5, "c": 0.5}
    own = dataclasses.replace(BASE, teacher_weights={"a": 1.0})
    assert reference.teacher_weights("b", pools, own) == {"a": 1.0}
    with pytest.raises(ValueError, match="other than 'a'"):
        reference.teacher_weights("a", pools, own)
    with pytest.raises(ValueError, match="sum to"):
        half = dataclasses.replace(BASE, teacher_weights={"a": 0.5})
        reference.teacher_weights("b", pools, half)


def test_merge_directions_keeps_the_rescaled_norm():
    rng = np.random.default_rng(4)
    g, delta = _random_model((5, 3), rng), _random_model((5, 3), rng)
    merged = reference.merge_directions(g, delta, 0.7)
    distilled = reference.subtract(merged, [(0.7 * kernel, 0.7 * bias) for kernel, bias in g])
    assert reference.global_norm(distilled) == pytest.approx(0.3 * reference.global_norm(g))
    cosine = _dot(distilled, delta) / (
        reference.global_norm(distilled) * reference.global_norm(delta)
    )
    assert cosine == pytest.approx(1.0)
    assert reference.global_norm(merged) <= reference.global_norm(g)
    nothing = reference.merge_directions(g, reference.zeros_like(delta), 0.7)
    _assert_close(nothing, [(0.7 * kernel, 0.7 * bias) for kernel, bias in g])


def test_alpha_one_is_fedavg():
    models, rounds = _problem(5)
    settings = {pool: dataclasses.replace(BASE, alpha=1.0) for pool in models}
    merged = reference.run("merged", models, rounds, settings)
    fedavg = reference.run("periodic", models, rounds, settings, period=len(rounds) + 1)
    for pool in models:
        _assert_close(merged[-1][pool], fedavg[-1][pool])
        other = dataclasses.replace(BASE, alpha=lambda t: 1.0 - 0.5 * t)
        scheduled = reference.run("merged", models, rounds, dict.fromkeys(models, other))
        _assert_close(scheduled[0][pool], fedavg[0][pool])
        assert _distance(scheduled[1][pool], fedavg[1][pool]) > 1e-3


def test_periodic_without_steps_under_sgd_is_fedavg():
    models, rounds = _problem(6)
    rounds = [dataclasses.replace(one, distillation={}) for one in rounds]
    for optimizer, same in (("sgd", True), ("adam", False)):
        settings = dict.fromkeys(models, dataclasses.replace(BASE, server_optimizer=optimizer))
        fedavg = reference.run("periodic", models, rounds, settings, period=9)
        periodic = reference.run("periodic", models, rounds, settings, period=2)
        for pool in models:
            _assert_close(periodic[1][pool], fedavg[1][pool])
            # Only Adam has moments for a codistillation to reset.
            assert (_distance(periodic[2][pool], fedavg[2][pool]) < 1e-12) == same


def test_periodic_round_written_out():
    models, rounds = _problem(7, pools=("small", "large", "other"))
    settings = dict.fromkeys(models, BASE)
    settings["large"] = dataclasses.replace(
        BASE, teacher_temperature=3.0, teacher_weights={"small": 0.9, "other": 0.1}
    )
    start = reference.initial_state(models)
    fedavg = reference.periodic_round(start, 1, rounds[0], settings, num_rounds=4, period=3)
    codist = reference.periodic_round(start, 1, rounds[0], settings, num_rounds=4, period=2)
    taught = {
        "small": [("large", 0.5, 3.0), ("other", 0.5, 1.0)],
        "large": [("small", 0.9, 1.0), ("other", 0.1, 1.0)],
        "other": [("small", 0.5, 1.0), ("large", 0.5, 3.0)],
    }
    for pool in models:
        assert (fedavg[pool].server_adam.steps, codist[pool].server_adam.steps) == (1, 0)
        assert reference.global_norm(codist[pool].server_adam.first_moment) == 0
        teachers = [
            reference.Teacher(fedavg[other].parameters, weight, temperature)
            for other, weight, temperature in taught[pool]
        ]
        student = reference.distill(
            fedavg[pool].parameters,
            teachers,
            rounds[0].distillation[pool],
            settings[pool],
            0.02 * (1 - 0.9 * 1 / 4),
        )
        _assert_close(codist[pool].parameters, student)
        assert _distance(student, fedavg[pool].parameters) > 1e-3


def test_equal_models_teach_nothing_before_the_update_and_something_after():
    models, rounds = _problem(8)
    models = dict.fromkeys(models, models["small"])
    # lambda = 0 makes the target equal the prediction to the last bit. With a mixture, rounding
    # errors of 1e-17 grow by up to learning rate / epsilon a step, and become a direction.
    plain = dataclasses.replace(BASE, alpha=0.6, server_optimizer="sgd", self_teacher_weight=0.0)
    settings = dict.fromkeys(models, plain)
    start = reference.initial_state(models)
    merged = reference.merged_round(start, 0, rounds[0], settings, num_rounds=3)
    fedavg = reference.periodic_round(start, 0, rounds[0], settings, num_rounds=3, period=2)
    periodic = reference.periodic_round(start, 0, rounds[0], settings, num_rounds=3, period=1)
    for pool in models:
        moved = reference.subtract(models[pool], fedavg[pool].parameters)
        expected = reference.sgd_step(models[pool], moved, 0.6)
        _assert_close(merged[pool].parameters, expected)
        assert _distance(periodic[pool].parameters, fedavg[pool].parameters) > 1e-3


@pytest.mark.parametrize("method", ["periodic", "merged"])
def test_pools_are_treated_alike_and_inputs_stay_untouched(method):
    models, rounds = _problem(9)
    before = {pool: reference.copy_parameters(models[pool]) for pool in models}
    settings = {"small": BASE, "large": dataclasses.replace(BASE, teacher_temperature=2.0)}
    swap = {"small": "large", "large": "small"}
    run = reference.run(method, models, rounds, settings, period=2)
    swapped = reference.run(
        method,
        {swap[pool]: models[pool] for pool in models},
        [
            RoundInputs(
                {swap[pool]: one.clients[pool] for pool in models},
                {swap[pool]: one.distillation[pool] for pool in models},
            )
            for one in rounds
        ],
        {swap[pool]: settings[pool] for pool in models},
        period=2,
    )
    for pool in models:
        for one, other in zip(run, swapped, strict=True):
            _assert_close(one[pool], other[swap[pool]])
        assert _distance(models[pool], before[pool]) == 0


@pytest.mark.parametrize("method", ["periodic", "merged"])
def test_distillation_teaches_the_student(method):
    models, rounds = _problem(10)
    # Almost no client training: what changes the models is the distillation.
    quiet = dataclasses.replace(
        BASE, client_learning_rate=1e-6, server_learning_rate=1e-3, alpha=0.0
    )
    settings = dict.fromkeys(models, dataclasses.replace(quiet, self_teacher_weight=0.0))
    after = reference.run(method, models, rounds, settings, period=1)[-1]
    for student, teacher in (("small", "large"), ("large", "small")):
        inputs = rounds[0].distillation[student][0]
        target = reference.softmax(reference.forward(models[teacher], inputs))
        first, _ = reference.kl_divergence(models[student], inputs, target)
        last, _ = reference.kl_divergence(after[student], inputs, target)
        assert last < first


@pytest.mark.parametrize("method", ["periodic", "merged"])
def test_float32_stays_float32_and_near_float64(method):
    models, rounds = _problem(11)
    settings = dict.fromkeys(models, BASE)
    double = reference.run(method, models, rounds, settings, period=2)
    single = reference.run(method, models, rounds, settings, period=2, dtype=np.float32)
    for pool in models:
        for exact, rounded in zip(double[-1][pool], single[-1][pool], strict=True):
            for tensor in range(2):
                assert rounded[tensor].dtype == np.float32
                error = np.linalg.norm(rounded[tensor] - exact[tensor])
                assert error <= 1e-3 * np.linalg.norm(exact[tensor])


def _problem(seed, pools=("small", "large"), num_rounds=3):
    rng = np.random.default_rng(seed)
    models = {pool: _random_model(SIZES.get(pool, (5, 6, 3)), rng) for pool in pools}
    rounds = [
        RoundInputs(
            clients={pool: [_client(rng, [4, 4, 2]), _client(rng, [4, 1])] for pool in pools},
            distillation={pool: [rng.normal(size=(6, 5)) for _ in range(4)] for pool in pools},
        )
        for _ in range(num_rounds)
    ]
    return models, rounds


def _client(rng, batch_sizes):
    batches = [(rng.normal(size=(size, 5)), rng.integers(0, 3, size)) for size in batch_sizes]
    return ClientRound(batches, sum(batch_sizes))


def _model_and_batch(seed):
    rng = np.random.default_rng(seed)
    model = _random_model((5, 7, 6, 3), rng)
    inputs = rng.normal(size=(8, 5))
    labels = rng.integers(0, 3, 8)
    target = reference.softmax(rng.normal(size=(8, 3)))
    return model, inputs, labels, target


def _random_model(sizes, rng):
    return [
        (rng.normal(size=(i, o)), 0.3 * rng.normal(size=o)) for i, o in itertools.pairwise(sizes)
    ]


def _scalar(value):
    return [(np.array([[value]]), np.array([value]))]


def _assert_gradient(loss, model, gradient, step=1e-6):
    for layer in range(len(model)):
        for tensor in range(2):
            for index in np.ndindex(model[layer][tensor].shape):
                values = []
                for sign in (1, -1):
                    moved = reference.copy_parameters(model)
                    moved[layer][tensor][index] += sign * step
                    values.append(loss(moved))
                slope = (values[0] - values[1]) / (2 * step)
                assert gradient[layer][tensor][index] == pytest.approx(slope, abs=1e-8)


def _assert_close(left, right):
    for (left_kernel, left_bias), (right_kernel, right_bias) in zip(left, right, strict=True):
        np.testing.assert_allclose(left_kernel, right_kernel, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(left_bias, right_bias, rtol=1e-12, atol=1e-13)


def _distance(left, right):
    return reference.global_norm(reference.subtract(left, right))


def _dot(left, right):
    return sum(
        np.sum(lk * rk) + np.sum(lb * rb) for (lk, lb), (rk, rb) in zip(left, right, strict=True)
    )
