"""The choice of targets and the losses of MHD, against loops over examples and their properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.algorithms.graph.mhd_losses import (
    CANDIDATES,
    HeadDistillation,
    by_level,
    candidates,
    chosen,
    distillation_gradient,
    embedding_loss,
    head_loss,
    top_few,
)
from fedcodist.core.model import Model, Variables
from fedcodist.models import MLP
from fedcodist.models.digits import BatchNormMLP
from fedcodist.models.multi_headed import HeadedOutputs, multi_headed

pytestmark = pytest.mark.usefixtures("compile_quickly")

# One compiled program for each, in place of one for each operation on each shape.
candidates = jax.jit(candidates, static_argnums=(2, 3))
chosen = jax.jit(chosen, static_argnums=1)
head_loss = jax.jit(head_loss)

BATCH, CLASSES, WIDTH = 4, 3, 5
FEW = settings(max_examples=10)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def outputs(seed, heads, teachers=None):
    """Random outputs; of some teachers where a number is given."""
    generator = np.random.default_rng(seed)
    lead = () if teachers is None else (teachers,)
    return HeadedOutputs(
        jnp.asarray(2 * generator.normal(size=(*lead, BATCH, 1 + heads, CLASSES))),
        jnp.asarray(generator.normal(size=(*lead, BATCH, WIDTH))),
    )


def softmax(logits):
    exponential = np.exp(logits - logits.max())
    return exponential / exponential.sum()


@FEW
@given(
    st.integers(0, 999), st.integers(1, 3), st.integers(0, 3), st.sampled_from(sorted(CANDIDATES))
)
def test_every_head_learns_from_its_surest_candidate(seed, heads, teachers, kind):
    own, others = outputs(seed, heads), outputs(seed + 1, heads, teachers)
    competing = candidates(own, others, kind)
    choice = chosen(competing, "most_confident", jax.random.key(0))
    expected = 0.0
    for example in range(BATCH):
        for head in range(1, heads + 1):
            # Section 2.1, one example and one head at a time.
            targets = [softmax(np.asarray(t[example, head - 1])) for t in others.logits]
            targets.append(softmax(np.asarray(own.logits[example, head - 1])))
            if kind in ("same_level", "same_level_and_self"):
                targets += [softmax(np.asarray(t[example, head])) for t in others.logits]
            if kind in ("self", "same_level_and_self"):
                targets.append(softmax(np.asarray(own.logits[example, head])))
            best = max(range(len(targets)), key=lambda n: targets[n].max())
            assert choice[example, head - 1] == best
            prediction = softmax(np.asarray(own.logits[example, head]))
            expected -= (targets[best] * np.log(prediction)).sum() / BATCH
    assert float(head_loss(own, competing, choice)) == pytest.approx(expected)


@FEW
@given(
    st.integers(0, 999), st.integers(1, 3), st.integers(0, 3), st.sampled_from(sorted(CANDIDATES))
)
def test_levels_apart_have_a_target_each(seed, heads, teachers, kind):
    own, others = outputs(seed, heads), outputs(seed + 1, heads, teachers)
    levels = by_level(candidates(own, others, kind), kind, teachers, is_separate=True)
    loss = 0.0
    for of_level in levels:
        choice = chosen(of_level, "most_confident", jax.random.key(0))
        loss += float(head_loss(own, of_level, choice))
    expected = 0.0
    for example in range(BATCH):
        for head in range(1, heads + 1):
            before = [softmax(np.asarray(t[example, head - 1])) for t in others.logits]
            before.append(softmax(np.asarray(own.logits[example, head - 1])))
            level = []
            if kind in ("same_level", "same_level_and_self"):
                level += [softmax(np.asarray(t[example, head])) for t in others.logits]
            if kind in ("self", "same_level_and_self"):
                level.append(softmax(np.asarray(own.logits[example, head])))
            prediction = softmax(np.asarray(own.logits[example, head]))
            # Without teachers at level k, the own head competes: alone it would teach itself.
            is_apart = "same_level" in kind and teachers > 0
            for targets in (before, level) if is_apart else (before + level,):
                if targets:
                    best = max(targets, key=np.max)
                    expected -= (best * np.log(prediction)).sum() / BATCH
    assert loss == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "choice", "apart_is_different"),
    [
        ("base", "most_confident", False),
        ("base", "random", False),
        ("self", "random", False),
        ("same_level_and_self", "most_confident", True),
    ],
)
def test_only_levels_of_teachers_can_be_apart_others_are_the_same_to_the_bit(
    kind, choice, apart_is_different
):
    model = multi_headed(MLP((WIDTH,), classes=None), jnp.zeros((1, 2)), CLASSES, heads=2)
    variables = model.init(jax.random.key(0))
    batch = {"image": jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, 2)))}
    teachers = outputs(1, 2, teachers=2)

    def gradient(**options):
        distillation = HeadDistillation(candidates=kind, choice=choice, **options)
        key = jax.random.key(1)
        return distillation_gradient(
            model, variables, batch, teachers, distillation, (0.0, 1.0), key
        )[0]

    one, apart = gradient(separate_levels=False), gradient(separate_levels=True)
    equal = [
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(apart), strict=True)
    ]
    assert all(equal) != apart_is_different
    # Nothing is lost with all classes, nor with all but one.
    for count in (CLASSES, CLASSES - 1):
        few = gradient(separate_levels=False, top_predictions=count)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), one, few)


@FEW
@given(st.integers(0, 999), st.integers(1, 6))
def test_few_predictions_are_sent_and_the_rest_is_spread(seed, count):
    classes = 6
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.ones(classes), size=(2, 3))
    received = np.asarray(top_few(jnp.asarray(probabilities), count))
    for place in np.ndindex(2, 3):
        order = np.argsort(-probabilities[place])
        expected = probabilities[place].copy()
        if count < classes:
            expected[order[count:]] = (1 - expected[order[:count]].sum()) / (classes - count)
        np.testing.assert_allclose(received[place], expected, atol=1e-12)
    np.testing.assert_allclose(received.sum(-1), 1)
    np.testing.assert_array_equal(received.max(-1), probabilities.max(-1))  # the confidence
    # Of equals the first are sent; what they leave is what the others had.
    equals = np.full((1, classes), 1 / classes)
    np.testing.assert_allclose(top_few(jnp.asarray(equals), count), equals)
    # Only the teachers' predictions travel: the client knows its own.
    own, others = outputs(seed, 2), outputs(seed + 1, 2, 2)
    whole, few = (candidates(own, others, "same_level_and_self", n) for n in (None, 1))
    sent = [0, 1, 3, 4]
    np.testing.assert_array_equal(few[jnp.array([2, 5])], whole[jnp.array([2, 5])])
    np.testing.assert_array_equal(few[jnp.array(sent)], top_few(whole[jnp.array(sent)], 1))


@FEW
@given(st.integers(0, 999), st.permutations(range(4)))
def test_permuting_candidates_permutes_the_choice(seed, order):
    competing = candidates(outputs(seed, 2), outputs(seed + 1, 2, 3), "base")
    choice = chosen(competing, "most_confident", jax.random.key(0))
    permuted = chosen(competing[jnp.array(order)], "most_confident", jax.random.key(0))
    np.testing.assert_array_equal(np.array(order)[permuted], choice)


def test_certain_candidates_win_uniform_ones_lose_and_the_first_of_equals_counts():
    certain = jnp.broadcast_to(jnp.eye(CLASSES)[1], (BATCH, 1, CLASSES))
    uniform = jnp.full((BATCH, 1, CLASSES), 1 / CLASSES)
    usual = jnp.broadcast_to(jnp.array([0.2, 0.5, 0.3]), (BATCH, 1, CLASSES))
    choose = lambda *each: chosen(jnp.stack(each), "most_confident", jax.random.key(0)).tolist()
    assert choose(usual, certain, uniform) == [[1]] * BATCH
    assert choose(uniform, usual, uniform) == [[1]] * BATCH
    assert choose(uniform, uniform) == [[0]] * BATCH
    assert choose(usual, usual[..., ::-1]) == [[0]] * BATCH


def test_public_batches_move_running_averages_only_where_it_is_wanted():
    backbone = BatchNormMLP((WIDTH,), classes=None)
    model = multi_headed(backbone, jnp.zeros((1, 2)), CLASSES, heads=1)
    variables = model.init(jax.random.key(0))
    batch = {"image": jnp.asarray(np.random.default_rng(0).normal(3.0, size=(BATCH, 2)))}

    @jax.jit
    def mutable_after(variables):
        return [
            distillation_gradient(
                model,
                variables,
                batch,
                outputs(1, 1, teachers=1),
                kind,
                (1.0, 1.0),
                jax.random.key(1),
            )[1]
            for kind in (HeadDistillation(), HeadDistillation(updates_statistics=True))
        ]

    usual, updated = mutable_after(variables)
    before = jax.tree.leaves(variables.mutable)
    assert before and all(map(np.array_equal, jax.tree.leaves(usual), before))
    assert not any(map(np.array_equal, jax.tree.leaves(updated), before))


def test_embeddings_of_16_bits_are_compared_in_float32():
    cast = lambda tree, dtype: jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), tree)
    rounded = cast((outputs(0, 0), outputs(1, 0, teachers=2)), jnp.bfloat16)

    def losses(outputs):
        own, others = outputs
        network = Model(None, lambda variables, *_, **__: (own, {}), None, {}, CLASSES)
        arguments = Variables({}, {}), {}, others, HeadDistillation(), (1.0, 1.0), jax.random.key(0)
        return distillation_gradient(network, *arguments)[2]["embedding_loss"]

    of_both = jax.jit(lambda *both: [losses(outputs) for outputs in both])
    found, expected = of_both(rounded, cast(rounded, np.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)


def test_random_choices_are_uniform_over_candidates():
    competing = jnp.broadcast_to(jnp.eye(4)[:, None, None], (4, 2000, 3, 4))
    counts = np.bincount(chosen(competing, "random", jax.random.key(0)).reshape(-1), minlength=4)
    assert (np.abs(counts - 1500) < 4.5 * np.sqrt(6000 * 3 / 16)).all()


@FEW
@given(st.integers(0, 999), st.booleans())
def test_self_is_the_rule_to_skip_examples_on_which_the_head_is_surer(seed, is_separate):
    own, others = outputs(seed, 2), outputs(seed + 1, 2, 2)

    def loss(logits, kind, kept):
        now = HeadedOutputs(logits, own.embedding)
        total = 0.0
        for competing in by_level(candidates(now, others, kind), kind, 2, is_separate):
            choice = chosen(competing, "most_confident", jax.random.key(0))
            target = jnp.take_along_axis(competing, choice[None, ..., None], axis=0)[0]
            per_example = -jnp.sum(target * jax.nn.log_softmax(logits[:, 1:]), axis=-1)
            total += jnp.sum(per_example * kept) / BATCH
        return total

    competing = candidates(own, others, "base")
    surest = competing.max(axis=(0, -1))
    skipped = jax.nn.softmax(own.logits[:, 1:]).max(axis=-1) > surest
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    masked = gradient(own.logits, "base", ~skipped)
    rule = gradient(own.logits, "self", jnp.ones_like(skipped))
    np.testing.assert_allclose(rule, masked, atol=1e-12)
    assert not np.asarray(masked[:, 1:])[np.asarray(skipped)].any()


@FEW
@given(st.integers(0, 999), st.sampled_from(sorted(CANDIDATES)))
def test_targets_and_the_main_head_get_no_gradient(seed, kind):
    own, others = outputs(seed, 2), outputs(seed + 1, 2, 2)

    def loss(own, others):
        competing = candidates(own, others, kind)
        choice = chosen(competing, "most_confident", jax.random.key(0))
        return head_loss(own, competing, choice) + embedding_loss(own, others, "squared")

    of_own, of_others = jax.jit(jax.grad(loss, argnums=(0, 1)))(own, others)
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0), of_others)
    np.testing.assert_array_equal(of_own.logits[:, 0], 0)
    assert np.abs(of_own.logits[:, 1:]).max() > 0 and np.abs(of_own.embedding).max() > 0


@FEW
@given(st.integers(0, 999), st.integers(1, 4), st.floats(0.1, 100))
def test_embeddings_are_compared_by_direction(seed, teachers, scale):
    own, others = outputs(seed, 1), outputs(seed + 1, 1, teachers)
    value = embedding_loss(own, others, "squared")
    a, b = np.asarray(own.embedding), np.asarray(others.embedding)
    length = lambda x: np.linalg.norm(x, axis=-1)
    cosine = (a * b).sum(-1) / (length(a) * length(b))
    assert float(value) == pytest.approx((2 - 2 * cosine).mean(-1).sum())
    norms = embedding_loss(own, others, "norm")
    assert float(norms) == pytest.approx(np.sqrt(2 - 2 * cosine).mean(-1).sum())
    assert 0 <= value <= 4 * teachers
    longer = own._replace(embedding=scale * own.embedding)
    assert float(embedding_loss(longer, others, "squared")) == pytest.approx(float(value))


@pytest.mark.parametrize("distance", ["squared", "norm"])
def test_equal_directions_are_at_distance_zero_and_no_gradient_is_infinite(distance):
    own = outputs(0, 1)
    same = own._replace(embedding=3 * own.embedding[None])
    value, slope = jax.value_and_grad(lambda own: embedding_loss(own, same, distance))(own)
    assert float(value) == pytest.approx(0, abs=1e-6)
    assert np.isfinite(slope.embedding).all()
    # Rectified embeddings may be all zeros, which have no direction.
    nothing = own._replace(embedding=jnp.zeros_like(own.embedding))
    value, slope = jax.value_and_grad(lambda own: embedding_loss(own, same, distance))(nothing)
    assert float(value) == pytest.approx(1)
    np.testing.assert_array_equal(slope.embedding, 0)


def test_heads_that_copy_the_one_before_are_a_stationary_state():
    # Appendix A.1: backbones frozen, every head sees only the client's own head before it.
    own = outputs(0, 3)
    copied = own._replace(logits=jnp.repeat(own.logits[:, :1], 4, axis=1))
    nobody = outputs(1, 3, teachers=0)

    def loss(logits):
        now = own._replace(logits=logits)
        competing = candidates(now, nobody, "base")
        return head_loss(now, competing, chosen(competing, "most_confident", jax.random.key(0)))

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(copied.logits), 0, atol=1e-12)
    # Least of all predictions, by Gibbs' inequality; the loss there is the main head's entropy.
    probabilities = np.asarray(jax.nn.softmax(own.logits[:, 0]))
    entropy = -(probabilities * np.log(probabilities)).sum(-1).mean()
    assert float(loss(copied.logits)) == pytest.approx(3 * entropy)
    # Clients that are alike are stationary too.
    alike = HeadedOutputs(
        jnp.repeat(copied.logits[None], 2, axis=0), jnp.repeat(own.embedding[None], 2, axis=0)
    )

    def with_others(own):
        competing = candidates(own, alike, "base")
        choice = chosen(competing, "most_confident", jax.random.key(0))
        return head_loss(own, competing, choice) + embedding_loss(own, alike, "squared")

    slope = jax.jit(jax.grad(with_others))(HeadedOutputs(copied.logits, own.embedding))
    jax.tree.map(lambda leaf: np.testing.assert_allclose(leaf, 0, atol=1e-12), slope)
