"""What parties send and report, how it is reduced and counted, and their outputs on shared examples."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_model import linear_model

from fedcodist.algorithms.graph.decentralised_periodic_codistillation import (
    decentralised_periodic_codistillation,
)
from fedcodist.algorithms.graph.public_answers import PublicAnswers
from fedcodist.algorithms.parties import party as party_module
from fedcodist.algorithms.parties.alignment import Alignment
from fedcodist.algorithms.parties.ds_fl import OpenExamples, ds_fl
from fedcodist.algorithms.parties.fccl import fccl
from fedcodist.algorithms.parties.fd import fd
from fedcodist.algorithms.parties.fed_gen import fed_gen
from fedcodist.algorithms.parties.fed_kd_parties import fed_kd_parties
from fedcodist.algorithms.parties.fed_l2g import fed_l2g
from fedcodist.algorithms.parties.fed_md import fed_md
from fedcodist.algorithms.parties.fed_mrl import fed_mrl
from fedcodist.algorithms.parties.fed_proto import fed_proto
from fedcodist.algorithms.parties.fml import fml
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.kt_pfl import kt_pfl
from fedcodist.algorithms.parties.lg_fed_avg import lg_fed_avg
from fedcodist.algorithms.parties.party import PARTIES, PartyResult, run_parties
from fedcodist.algorithms.parties.public_correlation import PublicBatches
from fedcodist.algorithms.parties.reductions import sums
from fedcodist.algorithms.parties.shared_examples import PUBLIC, all_examples, inference
from fedcodist.compression.compressed_reduce import compressed_reduce
from fedcodist.compression.error_feedback import with_error_feedback
from fedcodist.compression.quantisation import quantisation
from fedcodist.compression.top_k import top_k
from fedcodist.core.aggregation import weighted_mean
from fedcodist.core.communication import tree_bytes
from fedcodist.core.inputs import Cohort, Inputs, Round
from fedcodist.core.local_steps import StepTraining
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.headed import headed
from fedcodist.privacy.private_parties import private_classes, private_scores
from fedcodist.privacy.secure_sum_reduce import secure_sum_reduce
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7), 3, 4
GENERATOR = np.random.default_rng(0)
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)).astype(np.float32),
    "label": GENERATOR.integers(0, CLASSES, sum(SIZES)).astype(np.int32),
}
NAMES = ("consensus", "mixture", "target", "teacher")  # that public columns may have
PUBLIC_IMAGES = GENERATOR.normal(size=(9, FEATURES)).astype(np.float32)


MODEL = linear_model(FEATURES, CLASSES)
GROUPS = {"pair": PartyGroup(MODEL, np.array([0, 2])), "single": PartyGroup(MODEL, np.array([1]))}
COHORT = Cohort(
    jax.tree.map(jnp.asarray, COLUMNS), jnp.arange(3), jnp.array([0, 5, 7]), jnp.array(SIZES), 7
)
ROUND = Round(0, jax.random.key(0), Inputs({PARTIES: COHORT}, {}))
STATES = {"pair": jnp.array([1.0, 3.0]), "single": jnp.array([2.0])}


def update(model, message, number, data, key):
    """Each sends its size, weighted by its number, and reports ten times its number."""
    size = data.size.astype(jnp.float32)
    metrics = {"size": size, "num_steps": data.size}
    return PartyResult(number + 1, metrics, {"size": size}, number, {"tenfold": 10 * number})


def run_once(reduce=None):
    return run_parties(GROUPS, update, None, STATES, ROUND, jax.random.key(1), reduce=reduce)


def test_what_is_sent_is_a_mean_and_what_is_reported_is_kept_apart():
    found = run_once()
    expected = (1 * 5 + 2 * 2 + 3 * 7) / (1 + 2 + 3)
    np.testing.assert_allclose(found.combined["size"], expected, rtol=1e-6)
    np.testing.assert_array_equal(found.reports["pair"]["tenfold"], [10, 30])
    np.testing.assert_array_equal(found.reports["single"]["tenfold"], [20])
    np.testing.assert_array_equal(found.states["pair"], [2, 4])
    assert {name: int(value) for name, value in found.metrics.items() if "size" in name} == {
        "pair_0/size": 5,
        "pair_2/size": 7,
        "single/size": 2,
    }


@pytest.mark.parametrize("reduce", [None, sums()])
def test_parties_of_all_architectures_send_arrays_of_the_same_shapes(reduce):
    """[2, 3] and [1, 1] could be added, but their sum is nobody's."""

    def send(model, message, state, data, key):
        return PartyResult(state, {"num_steps": data.size}, sends=state)

    states = {"pair": jnp.ones((2, 3)), "single": jnp.ones((1, 1))}
    with pytest.raises(TypeError) as error:
        run_parties(GROUPS, send, None, states, ROUND, jax.random.key(1), reduce=reduce)
    assert str(error.value) == (
        "parties of 'single' must send what those of 'pair' send: at [0] it has float32[1] in place of "
        "float32[3]."
    )


def test_sums_are_not_divided():
    assert run_once(sums()).combined["size"] == 1 * 5 + 2 * 2 + 3 * 7


@pytest.mark.parametrize(
    "wrap",
    [
        lambda reduce: reduce,
        lambda reduce: compressed_reduce(quantisation(16), reduce),
        lambda reduce: secure_sum_reduce(3, 100.0, 3.0, reduce=reduce),
    ],
    ids=["alone", "quantised", "summed securely"],
)
def test_what_a_reduction_measures_is_a_metric_of_every_party(wrap):
    """Also a reduction of one's own, within those of the library; not of a pass that sends nothing."""

    def finalize(total, message, key):
        aggregate = weighted_mean().finalize(total, message, key)
        return aggregate._replace(metrics={"sum_of_weights": aggregate.weight})

    reduce = wrap(weighted_mean()._replace(finalize=finalize))
    found = run_once(reduce).metrics
    for party, size in {"pair_0": 5, "pair_2": 7, "single": 2}.items():
        np.testing.assert_allclose(found[f"{party}/sum_of_weights"], 6, rtol=1e-5)
        assert found[f"{party}/size"] == size

    def silent(*arguments):
        return update(*arguments)._replace(sends=None)

    again = run_parties(GROUPS, silent, None, STATES, ROUND, jax.random.key(1), reduce=reduce)
    assert {name.partition("/")[2] for name in again.metrics} == {"size", "num_steps"}


def test_a_reduction_gets_a_key_of_each_party_and_one_of_the_round():
    """Keys for noise and masks: no two parties have the same, and devices do not change them."""
    drawn = []

    def prepare(result, key):
        return {"noise": jax.random.normal(key), "sent": weighted_mean().prepare(result, key)}

    def finalize(total, message, key):
        drawn.append((total["noise"], jax.random.normal(key)))
        return weighted_mean().finalize(total["sent"], message, key)

    reduce = weighted_mean()._replace(prepare=prepare, finalize=finalize)
    found, again = run_once(reduce), run_once(reduce)
    jax.tree.map(np.testing.assert_array_equal, found.combined, run_once().combined)
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]
    assert found.metrics == again.metrics


ALGORITHMS = {
    "fed_md": functools.partial(fed_md, GROUPS, Alignment(np.arange(9) % 2, 6), CLASSES),
    "fd": functools.partial(fd, GROUPS, CLASSES),
    "ds_fl": functools.partial(ds_fl, GROUPS, MODEL, OpenExamples(9, 6)),
    "fml": functools.partial(fml, GROUPS, MODEL),
    "fed_kd_parties": functools.partial(fed_kd_parties, GROUPS, MODEL, COLUMNS),
}


def round_of(algorithm, sizes=SIZES, **others):
    """One round, to be traced or run: state -> (state, metrics).

    Args:
      algorithm: of the three parties.
      sizes: how many of their examples the parties have.
      others: public columns.
    """
    private = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
    data = jax.tree.map(
        jnp.asarray, resident_data(private, {PUBLIC: {"image": PUBLIC_IMAGES, **others}})
    )
    key = jax.random.key(0)

    def round_(state):
        hyper = jax.tree.map(jnp.asarray, algorithm.hyper)
        inputs = data.read(algorithm.select(0, key))
        cohort = dataclasses.replace(inputs.cohorts[PARTIES], sizes=jnp.array(sizes))
        inputs = dataclasses.replace(inputs, cohorts={PARTIES: cohort})
        state, _, metrics = algorithm.round(state, {}, Round(0, key, inputs), hyper)
        return state, metrics

    return round_


@pytest.mark.parametrize("name", ALGORITHMS)
def test_communication_counts_what_parties_send_and_report(name, monkeypatch):
    algorithm, real, counted = ALGORITHMS[name](), party_module._prepare_here, []

    def watched(reduce, result, key):
        _, reports = result.client_state
        counted.append(tree_bytes(result.update) + tree_bytes(reports))
        return real(reduce, result, key)

    monkeypatch.setattr(party_module, "_prepare_here", watched)
    jax.eval_shape(round_of(algorithm), jax.eval_shape(algorithm.init, jax.random.key(0)))
    assert set(counted) - {0} == {about.up for about in algorithm.communication.values()}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_method_of_parties_may_send_compressed(name):
    """At 16 bits what parties send is nearly the same; the bytes that it takes are measured."""
    inner = sums() if name == "fd" else None
    algorithms = [
        ALGORITHMS[name](),
        ALGORITHMS[name](reduce=compressed_reduce(quantisation(16), inner)),
    ]
    state = algorithms[0].init(jax.random.key(0))
    (plain, before), (found, metrics) = (jax.jit(round_of(each))(state) for each in algorithms)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-3), found, plain)
    measured = {key for key in metrics if key.endswith("/client_bytes_up")}
    assert measured == {f"{party}/client_bytes_up" for party in algorithms[0].communication}
    assert not any(key.endswith("bytes_up") for key in before)
    for party, about in algorithms[0].communication.items():
        # Half of the floats, and the grid of each array.
        assert about.up / 2 < metrics[f"{party}/client_bytes_up"] <= about.up / 2 + 16


OF_TARGETS = {
    "fed_md": lambda training: ALGORITHMS["fed_md"](training),
    "ds_fl": lambda training: ALGORITHMS["ds_fl"](distillation=training),
    "kt_pfl": lambda training: kt_pfl(GROUPS, OpenExamples(9, 6), distillation=training),
    "decentralised_periodic_codistillation": lambda training: decentralised_periodic_codistillation(
        GROUPS, PublicAnswers(9, 6), 2, 1 - np.eye(3), StepTraining(batch_size=2), training
    ),
}


@pytest.mark.parametrize("name", ["ds_fl", "kt_pfl"])
def test_a_distillation_without_a_step_has_no_loss(name):
    """A party without examples takes none. A loss of 0 would count in means."""
    algorithm = OF_TARGETS[name](LocalTraining(batch_size=3))
    state = algorithm.init(jax.random.key(0))
    _, metrics = jax.jit(round_of(algorithm, sizes=(5, 0, 7)))(state)
    for loss in ("loss", "distillation_loss"):
        assert np.isnan(metrics[f"single/{loss}"])
        assert metrics[f"pair_0/{loss}"] > 0 and metrics[f"pair_2/{loss}"] > 0


@pytest.mark.parametrize("name", OF_TARGETS)
def test_targets_do_not_pass_through_the_preprocessing_of_public_examples(name):
    """It returns the columns that it knows, and these may have any names."""

    def known(batch, key, positions):
        return {"image": batch["image"]} | {name: batch[name] + 1 for name in NAMES}

    labels = {name: np.zeros((9, CLASSES), np.float32) for name in NAMES}
    plain = OF_TARGETS[name](LocalTraining(batch_size=3))
    state = plain.init(jax.random.key(0))
    expected, _ = jax.jit(round_of(plain))(state)
    algorithm = OF_TARGETS[name](LocalTraining(batch_size=3, preprocess=known))
    found, _ = jax.jit(round_of(algorithm, **labels))(state)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


HEADED = {"all": PartyGroup(headed(nn.Dense(2), jnp.zeros((1, FEATURES)), CLASSES), range(3))}
OF_SUMS = {
    "fd": ALGORITHMS["fd"],
    "fed_proto": functools.partial(fed_proto, HEADED, CLASSES),
    "fed_l2g": functools.partial(fed_l2g, HEADED, CLASSES),
}


@pytest.mark.parametrize("name", OF_SUMS)
def test_methods_of_sums_refuse_reductions_that_average(name):
    """A mean number of parties is at most 1: no other party would seem to have a label."""
    q = quantisation(16)
    for average in (
        weighted_mean(),
        compressed_reduce(q),
        secure_sum_reduce(3, 1.0),
        secure_sum_reduce(3, 1.0, reduce=compressed_reduce(q)),
        private_scores(1.0, 0.0),
    ):
        with pytest.raises(
            ValueError, match=r"^reduce must return sums, such as .*sums\(\)"
        ) as raised:
            OF_SUMS[name](reduce=average)
        assert "\n" not in str(raised.value)
    for inner in (sums(), private_classes(1.0, 0.0)):
        assert OF_SUMS[name](reduce=inner).name == name
        assert OF_SUMS[name](reduce=compressed_reduce(q, inner)).name == name
        assert OF_SUMS[name](reduce=secure_sum_reduce(3, 1.0, reduce=inner)).name == name


BATCHES = PublicBatches(9, 3)
OF_MEANS = {name: make for name, make in ALGORITHMS.items() if name != "fd"} | {
    "fccl": functools.partial(fccl, GROUPS, CLASSES, BATCHES),
    "fed_mrl": functools.partial(fed_mrl, HEADED, HEADED["all"].model),
    "lg_fed_avg": functools.partial(lg_fed_avg, HEADED),
    "fed_gen": functools.partial(fed_gen, HEADED),
}


@pytest.mark.parametrize("name", OF_MEANS)
def test_methods_of_means_refuse_reductions_that_sum(name):
    """The consensus of n parties would be n times too large."""
    q = quantisation(16)
    for summing in (sums(), compressed_reduce(q, sums()), private_classes(1.0, 0.0)):
        with pytest.raises(ValueError, match=r"^reduce must return means, such as ") as raised:
            OF_MEANS[name](reduce=summing)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("what", ["sends", "reports", "state"])
def test_what_a_party_sends_and_its_model_are_finite_or_not(what):
    """A run stops in the round in which a party sends NaN, and not when its model has become NaN."""
    value = {"sends": 0.0, "reports": 0.0, "state": 0.0} | {what: jnp.nan}

    def update(model, message, state, data, key):
        variables = Variables({"w": jnp.full(2, value["state"])}, {})
        metrics = party_module.party_metrics(variables, 1, 1)
        sends, reports = jnp.full(2, value["sends"]), jnp.full(2, value["reports"])
        return PartyResult(variables, metrics, sends, reports=reports)

    first = lambda count: Variables({"w": jnp.zeros((count, 2))}, {})
    states = {"pair": first(2), "single": first(1)}
    found = run_parties(GROUPS, update, None, states, ROUND, jax.random.key(1))
    assert [bool(found.metrics[f"{n}/finite"]) for n in ("pair_0", "pair_2", "single")] == [
        False
    ] * 3


def test_a_server_that_is_not_finite_stops_the_run():
    algorithm = ALGORITHMS["ds_fl"]()
    one_round = jax.jit(round_of(algorithm))
    state = algorithm.init(jax.random.key(0))
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state.server)
    for server, expected in ((state.server, True), (broken, False)):
        _, metrics = one_round(state._replace(server=server))
        found = [bool(metrics[f"{name}/finite_model"]) for name in algorithm.communication]
        assert found == [expected] * 3


def test_a_party_of_another_device_computes_nothing():
    data = all_examples({"x": jnp.ones(3)})
    assert party_module.if_here(data, lambda: jnp.ones(2)).tolist() == [1, 1]
    elsewhere = dataclasses.replace(data, bound=jnp.int32(0))
    assert party_module.if_here(elsewhere, lambda: jnp.ones(2)).tolist() == [0, 0]


ONE_LOGIT = {"pair": PartyGroup(linear_model(FEATURES, 1), np.arange(3))}
# Name -> a method of groups of networks that have so many classes, and of a network of the server's.
OF_PROBABILITIES = {
    "kt_pfl": lambda groups, classes, server: kt_pfl(groups, OpenExamples(9, 6)),
    "ds_fl": lambda groups, classes, server: ds_fl(groups, server, OpenExamples(9, 6)),
    "fml": lambda groups, classes, server: fml(groups, server),
    "fccl": lambda groups, classes, server: fccl(groups, classes, BATCHES),
    "fd": lambda groups, classes, server: fd(groups, classes),
    "fed_md": lambda groups, classes, server: fed_md(
        groups, Alignment(np.zeros(9, int), 6, exchanged="probabilities"), classes
    ),
    "fed_kd_parties": lambda groups, classes, server: fed_kd_parties(groups, server, COLUMNS),
    "decentralised_periodic_codistillation": lambda groups, classes, server: (
        decentralised_periodic_codistillation(
            groups, PublicAnswers(9), 2, ~np.eye(3, dtype=bool), StepTraining(batch_size=2, steps=1)
        )
    ),
}


@pytest.mark.parametrize("name", OF_PROBABILITIES)
def test_networks_of_one_logit_have_no_probabilities_to_exchange(name):
    """They are 1, so that parties would learn nothing from each other, without a word."""
    with pytest.raises(ValueError, match=r"must be at least 2, got 1: give networks of one logit"):
        OF_PROBABILITIES[name](ONE_LOGIT, 1, ONE_LOGIT["pair"].model)


@pytest.mark.parametrize(
    ("outputs_of", "logits_of", "got"),
    [
        (lambda logits: (logits, 0.0), lambda outputs: outputs[0], r"a tuple of 2"),
        (
            lambda logits: jnp.stack([logits, logits], axis=1),
            lambda outputs: outputs[:, 0],
            r"float32\[\d+, 2, 3\]",
        ),
    ],
    ids=["more than logits", "logits of positions"],
)
def test_a_network_that_returns_other_outputs_is_one_line(outputs_of, logits_of, got):
    other = lambda *arguments, **options: (outputs_of(MODEL.apply(*arguments, **options)[0]), {})
    loss = lambda outputs, batch: MODEL.loss(logits_of(outputs), batch)
    model = MODEL._replace(apply=other, loss=loss, metrics={})
    groups = {"all": PartyGroup(model, np.arange(3))}
    found = {}
    for name, make in OF_PROBABILITIES.items():
        try:
            algorithm = make(groups, CLASSES, model)
            jax.eval_shape(round_of(algorithm), jax.eval_shape(algorithm.init, jax.random.key(0)))
        except TypeError as error:
            found[name] = str(error)
    assert found.keys() == OF_PROBABILITIES.keys()
    for name, line in found.items():
        who = r"groups\['all'\].model" if name == "fed_kd_parties" else "networks of this method"
        assert re.fullmatch(rf"{who} must return logits \[batch, classes\], got {got}\.", line)


def test_fed_md_exchanges_the_logits_of_networks_of_one_logit():
    assert fed_md(ONE_LOGIT, Alignment(np.zeros(9, int), 6), 1).name == "fed_md"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("meme", lambda groups: fml(groups, MODEL)),
        ("server", lambda groups: ds_fl(groups, MODEL, OpenExamples(9, 6))),
        ("student", lambda groups: fed_kd_parties(groups, MODEL, COLUMNS)),
        ("pair_2", lambda groups: fd({**groups, **GROUPS}, CLASSES)),
    ],
)
def test_an_architecture_is_not_called_like_another_model(name, make):
    """Its parties' results would be missing, which ended in an error after the last round."""
    clients = np.array([0, 2]) if name != "pair_2" else np.array([3, 4])
    message = f"names that tell models apart, .* both have one called '{name}'"
    with pytest.raises(ValueError, match=message):
        make({name: PartyGroup(MODEL, clients)})


def test_a_compressor_with_a_memory_is_refused():
    reduce = compressed_reduce(with_error_feedback(top_k(0.5)))
    with pytest.raises(ValueError, match="compressor must not have a memory"):
        run_once(reduce)


def test_inference_of_something_else_than_logits():
    variables = MODEL.init(jax.random.key(0))
    examples = all_examples({"image": jnp.asarray(PUBLIC_IMAGES)})
    say = functools.partial(inference, MODEL, variables, examples, lambda batch, key, at: batch, 4)
    logits = PUBLIC_IMAGES @ np.asarray(variables.params["w"])
    np.testing.assert_allclose(say(), logits, rtol=1e-5, atol=1e-6)
    found = say(of=lambda outputs: outputs.max(axis=-1))
    np.testing.assert_allclose(found, logits.max(-1), rtol=1e-5, atol=1e-6)
