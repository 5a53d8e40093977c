"""Every client judged on its own test examples, against plain loops."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_model import linear_model

import fedcodist as fc
from fedcodist.algorithms.parties.local_only import LocalOnlyHyper
from fedcodist.core.client_states import HostClientStates
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.metrics import accuracy
from fedcodist.core.model import Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.within_clients import train_test_within_clients, unseen_clients
from fedcodist.run.client_evaluation import client_evaluation
from fedcodist.run.client_metrics import (
    CLIENTS,
    ClientMetrics,
    client_records,
    load_clients,
    spread,
)
from fedcodist.run.client_splits import ClientSplit
from fedcodist.run.experiment import Outcome
from fedcodist.run.programs import build_programs

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES = (9, 1, 6, 12, 5)  # client 1 has one example, and no test example
CLASSES = 3


def network(width):
    model = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(CLASSES)])
    return fc.from_flax_linen(model, jnp.zeros((1, 4)), inputs="x")


MODEL = network(6)
TRAINING = LocalTraining(batch_size=4)


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(0)
    count = sum(SIZES)
    columns = {
        "x": draw.normal(size=(count, 4)).astype(np.float32),
        "label": draw.integers(0, CLASSES, count).astype(np.int32),
    }
    columns["label"][:9] = 1  # client 0 lacks two labels
    return FederatedData.from_arrays(columns, offsets=np.cumsum([0, *SIZES]))


@pytest.fixture(scope="module")
def dealt(data):
    return train_test_within_clients(data, 0.3)


def experiment(train, algorithm, source=fc.resident_data, **settings):
    everybody = {name: column[:20] for name, column in train.columns.items()}
    settings = {"rounds": 4, "evaluate_every": 2, "seeds": 2, **settings}
    return fc.Experiment(algorithm, source(train), {"everybody": everybody}, **settings)


def two_pools(train, method=None, clients=(np.arange(5), np.array([0, 1, 3]))):
    method = method or fc.fed_avg(MODEL, TRAINING)
    pools = {"large": fc.Pool(method, clients[0], 2), "small": fc.Pool(method, clients[1], 1)}
    return fc.independent_pools(pools, train.columns)


def plain_accuracy(model, variables, examples):
    """Accuracy and loss of one model on one client's examples, with NumPy."""
    logits = np.asarray(model.apply(variables, {"x": jnp.asarray(examples["x"])})[0], np.float64)
    labels = examples["label"]
    shifted = logits - logits.max(1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    loss = -log_probabilities[np.arange(len(labels)), labels].mean()
    return (logits.argmax(1) == labels).mean(), loss


def of_seed(variables, seed):
    return jax.tree.map(lambda leaf: leaf[seed], variables)


def assert_models_are_those_measured(run, outcome, test, networks, names):
    """The models of each client have the accuracies that the run has measured, on both seeds.

    Args:
      run, outcome: the experiment and its outcome.
      test: the split "own".
      networks: name -> Model.
      names: client -> name of the model in the split -> name among the client's models.
    """
    for client, models in names.items():
        found = fc.models_of_client(run, outcome, client)
        assert set(found) == set(models.values())
        for measured, name in models.items():
            of_clients = outcome.clients["own"].get(measured)
            if of_clients is None or client not in of_clients.clients:
                continue
            place = of_clients.clients.tolist().index(client)
            for seed in range(2):
                accuracy, loss = plain_accuracy(
                    networks[name], of_seed(found[name], seed), test.client(client)
                )
                assert of_clients.metrics["accuracy"][seed, place] == pytest.approx(accuracy)
                assert of_clients.metrics["loss"][seed, place] == pytest.approx(loss, rel=1e-5)


def test_shared_models_are_measured_on_each_clients_own_examples(data, dealt):
    train, test = dealt
    outcome = fc.run_experiment(
        experiment(train, two_pools(train), client_splits={"own": test}), show_progress=False
    )
    for pool, clients in (("large", [0, 2, 3, 4]), ("small", [0, 3])):
        measured = outcome.clients["own"][pool]
        assert measured.clients.tolist() == clients
        assert measured.examples.tolist() == test.client_sizes[clients].tolist()
        for seed in range(2):
            model = of_seed(outcome.variables[pool], seed)
            for place, client in enumerate(clients):
                accuracy, loss = plain_accuracy(MODEL, model, test.client(client))
                assert measured.metrics["accuracy"][seed, place] == pytest.approx(accuracy)
                assert measured.metrics["loss"][seed, place] == pytest.approx(loss, rel=1e-5)


def test_metrics_lines_have_the_distribution_over_clients(dealt):
    train, test = dealt
    outcome = fc.run_experiment(
        experiment(train, two_pools(train), client_splits={"own": test}), show_progress=False
    )
    measured = outcome.clients["own"]["large"]
    lines = [r for r in outcome.records if (r["model"], r["split"]) == ("large", "own")]
    assert [line["round"] for line in lines] == [0, 0, 2, 2, 4, 4]
    line, values = lines[-1], measured.metrics["accuracy"][1].astype(np.float64)
    examples = measured.examples
    assert line["clients"] == 4
    expected = {
        "accuracy": values.mean(),
        "accuracy_weighted": (values * examples).sum() / examples.sum(),
        "accuracy_std": values.std(),
        "accuracy_min": values.min(),
        "accuracy_p10": np.percentile(values, 10),
        "accuracy_worst_tenth": values.min(),  # the tenth of four clients is one
    }
    for name, value in expected.items():
        assert line[name] == pytest.approx(value, rel=1e-6), name
    final = outcome.summary["final"]["large"]["own"]
    assert final["accuracy_worst_tenth"][1] == pytest.approx(values.min(), rel=1e-6)


@pytest.mark.parametrize(("metric", "worst"), [("accuracy", 0.05), ("error", 1.85)])
def test_the_worst_tenth_is_the_highest_where_lower_is_better(metric, worst):
    found = spread(metric, np.arange(20) / 10)
    assert found["worst_tenth"] == pytest.approx(worst)
    assert found["min"] == 0.0


def test_fine_tuned_models_are_those_of_one_more_local_training(dealt):
    train, test = dealt
    whole_batches = LocalTraining(batch_size=64)  # one step, so that no shuffle matters
    method = fc.fed_avg(MODEL, whole_batches, hyper=fc.FedAvgHyper(client_learning_rate=0.3))
    outcome = fc.run_experiment(
        experiment(train, two_pools(train, method), client_splits={"own": test}),
        show_progress=False,
    )
    measured = outcome.clients["own"]["large_fine_tuned"]
    for seed in range(2):
        shared = of_seed(outcome.variables["large"], seed)
        for place, client in enumerate(measured.clients):
            own = train.client(int(client))

            def loss(params, own=own, shared=shared):
                logits = MODEL.apply(shared._replace(params=params), {"x": own["x"]}, train=True)[0]
                return -jax.nn.log_softmax(logits)[jnp.arange(len(own["x"])), own["label"]].mean()

            gradient = jax.grad(loss)(shared.params)
            params = jax.tree.map(lambda p, g: p - 0.3 * g, shared.params, gradient)
            _, expected = plain_accuracy(
                MODEL, shared._replace(params=params), test.client(int(client))
            )
            assert measured.metrics["loss"][seed, place] == pytest.approx(expected, rel=1e-4)
    # They are measured in the last evaluation alone.
    rounds = {r["round"] for r in outcome.records if r["model"] == "large_fine_tuned"}
    assert rounds == {4}


@pytest.mark.parametrize("source", [fc.resident_data, fc.StreamedData])
def test_each_client_is_fine_tuned_on_its_own_examples(source):
    """One step from zeros: a client's model then knows the only label of the client's examples."""
    images = np.ones((5, 1), np.float32)
    labels = np.array([0, 0, 0, 2, 2], np.int32)
    train = FederatedData.from_arrays({"image": images, "label": labels}, offsets=[0, 3, 5])
    model = linear_model(1, CLASSES)
    zeros = lambda key: Variables({"w": jnp.zeros((1, CLASSES))}, {})
    hyper = fc.FedAvgHyper(client_learning_rate=1.0)
    method = fc.fed_avg(model._replace(init=zeros), LocalTraining(batch_size=8), hyper=hyper)
    algorithm = fc.independent_pools({"pool": fc.Pool(method, np.arange(2), 2)}, train.columns)
    # Two of client 1's three test examples have its own label, and one has client 0's.
    columns = {"image": images[:4], "label": np.array([0, 2, 2, 0], np.int32)}
    tested = FederatedData.from_arrays(columns, offsets=[0, 1, 4])
    run = fc.Experiment(algorithm, source(train), {}, 1, client_splits={"own": ClientSplit(tested)})
    on_host = HostClientStates(algorithm.client_states, 1) if source is fc.StreamedData else None
    of_run = (None, np.zeros(1, np.uint32), algorithm.hyper, on_host)
    evaluate = client_evaluation(build_programs(algorithm, 1), run, source(train), *of_run)
    state = jax.tree.map(lambda leaf: leaf[None], algorithm.init(jax.random.key(0)))
    found = evaluate(state, {"pool": None}, run.client_splits, True)["own"]["pool_fine_tuned"]
    # The gradient at zeros is a third less the one-hot label.
    right, wrong = (np.log(np.exp(2 / 3) + 2 * np.exp(-1 / 3)) - z for z in (2 / 3, -1 / 3))
    np.testing.assert_allclose(found.metrics["accuracy"], [[1, 2 / 3]], rtol=1e-6)
    expected = [[right, (2 * right + wrong) / 3]]
    np.testing.assert_allclose(found.metrics["loss"], expected, rtol=1e-5)


def test_unseen_clients_are_personalised_and_measured(data):
    seen, unseen = unseen_clients(data.select([0, 2, 3, 4]), 2)
    (train, own), (unseen_train, unseen_test) = (
        train_test_within_clients(part, 0.3) for part in (seen, unseen)
    )
    algorithm = fc.independent_pools(
        {"all": fc.Pool(fc.fed_avg(MODEL, TRAINING), np.arange(2), 2)}, train.columns
    )
    splits = {"own": own, "unseen": ClientSplit(unseen_test, unseen_train)}
    outcome = fc.run_experiment(
        experiment(train, algorithm, client_splits=splits), show_progress=False
    )
    before, after = (outcome.clients["unseen"][name] for name in ("all", "all_fine_tuned"))
    assert before.clients.tolist() == after.clients.tolist() == [0, 1]
    for client in (0, 1):
        accuracy, _ = plain_accuracy(
            MODEL, of_seed(outcome.variables["all"], 0), unseen_test.client(client)
        )
        assert before.metrics["accuracy"][0, client] == pytest.approx(accuracy)
    assert (before.metrics["loss"] != after.metrics["loss"]).all()


def test_every_party_is_measured_on_its_own_examples(dealt):
    train, test = dealt
    groups = {"wide": fc.PartyGroup(network(8), [0, 4]), "thin": fc.PartyGroup(MODEL, [1, 2, 3])}
    algorithm = fc.local_only(groups, TRAINING, hyper=LocalOnlyHyper(0.1))
    run = experiment(train, algorithm, client_splits={"own": test})
    outcome = fc.run_experiment(run, show_progress=False)
    measured = outcome.clients["own"]["parties"]
    assert list(outcome.clients["own"]) == ["parties"]
    assert measured.clients.tolist() == [0, 2, 3, 4]
    parties = {0: "wide_0", 2: "thin_2", 3: "thin_3", 4: "wide_4"}
    for place, (client, party) in enumerate(parties.items()):
        model = groups[party.split("_")[0]].model
        accuracy, loss = plain_accuracy(
            model, of_seed(outcome.variables[party], 1), test.client(client)
        )
        assert measured.metrics["accuracy"][1, place] == pytest.approx(accuracy)
        assert measured.metrics["loss"][1, place] == pytest.approx(loss, rel=1e-5)
    names = {client: {"parties": party} for client, party in (parties | {1: "thin_1"}).items()}
    networks = {party: groups[party.split("_")[0]].model for party in parties.values()}
    assert_models_are_those_measured(run, outcome, test, networks, names)


def test_the_centralised_models_are_measured_on_all_clients_of_their_architecture(dealt):
    """Not on those of the one client by which the model is named."""
    train, test = dealt
    groups = {
        "wide": fc.PartyGroup(MODEL, np.array([0, 1, 4])),
        "thin": fc.PartyGroup(network(3), np.array([2, 3])),
    }
    everything = train.all_examples()
    training = fc.StepTraining(batch_size=4, steps=2)
    algorithm = fc.centralised(groups, len(everything["label"]), 4, training)
    source = lambda data: fc.resident_data(data, {"shared": everything})
    run = experiment(train, algorithm, source, client_splits={"own": test})
    outcome = fc.run_experiment(run, show_progress=False)
    measured = outcome.clients["own"]["parties"]
    assert measured.clients.tolist() == [0, 2, 3, 4]
    names = {0: "wide", 2: "thin", 3: "thin", 4: "wide"}
    for place, (client, name) in enumerate(names.items()):
        for seed in range(2):
            variables = of_seed(outcome.variables[name], seed)
            model = groups[name].model
            accuracy, _ = plain_accuracy(model, variables, test.client(client))
            assert measured.metrics["accuracy"][seed, place] == pytest.approx(accuracy)
    networks = {name: group.model for name, group in groups.items()}
    of_clients = {client: {"parties": name} for client, name in names.items()}
    assert_models_are_those_measured(run, outcome, test, networks, of_clients)


def teachers(train):
    hyper = fc.FedKDHyper(teacher_learning_rate=0.1, student_learning_rate=0.1)
    method = fc.fed_kd(MODEL, network(5), train.columns, TRAINING, hyper=hyper)
    return two_pools(train, method)


def test_streamed_data_give_the_same_numbers(dealt):
    train, test = dealt
    runs = [
        experiment(train, teachers(train), source, client_splits={"own": test})
        for source in (fc.resident_data, fc.StreamedData)
    ]
    outcomes = [fc.run_experiment(run, show_progress=False) for run in runs]
    resident, streamed = (outcome.clients for outcome in outcomes)
    assert {"large", "large_teachers", "large_teachers_fine_tuned"} <= resident["own"].keys()
    for model, measured in resident["own"].items():
        other = streamed["own"][model]
        assert measured.clients.tolist() == other.clients.tolist()
        for name, values in measured.metrics.items():
            np.testing.assert_allclose(other.metrics[name], values, rtol=1e-5, err_msg=model)

    # Teachers are kept by clients, on the device or on the host.
    both = [pool + ending for pool in ("large", "small") for ending in ("", "_teachers")]
    networks = {name: MODEL if name.endswith("_teachers") else network(5) for name in both}
    names = {client: {name: name for name in both} for client in (0, 1, 3)}
    names |= {client: {name: name for name in both[:2]} for client in (2, 4)}
    for run, outcome in zip(runs, outcomes, strict=True):
        assert_models_are_those_measured(run, outcome, test, networks, names)


def test_the_models_of_streamed_clients_are_the_last_ones_where_others_were_kept(dealt):
    """They are those that a run of resident data, which keeps nothing, has on the device."""
    train, test = dealt
    model = fc.headed(nn.Dense(6), jnp.zeros((1, 4)), CLASSES, inputs="x")
    pool = fc.Pool(fc.fed_per(model, TRAINING), np.array([0, 2, 4]), 2)
    settings = {"final_splits": {"final": test}, "rounds": 2, "evaluate_every": 1, "seeds": 1}
    resident, streamed = (
        experiment(train, fc.independent_pools({"pool": pool}, train.columns), source, **settings)
        for source in (fc.resident_data, fc.StreamedData)
    )
    first = lambda records: fc.Decision(keep=records[0]["round"] == 1)
    plain = fc.run_experiment(resident, show_progress=False)
    kept = fc.run_experiment(streamed, callbacks=[first], show_progress=False)
    assert kept.kept.round == 1
    for client in (0, 2, 4):
        models = fc.models_of_client(resident, plain, client)
        assert set(models) == {"pool", "pool_personal"}
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            models,
            fc.models_of_client(streamed, kept, client),
        )


def test_only_clients_who_train_have_models(dealt):
    train, _ = dealt
    run = experiment(train, two_pools(train, clients=(np.arange(4), np.array([0, 1, 3]))))
    outcome = Outcome([], {}, {}, None)  # what it holds is not read
    with pytest.raises(
        ValueError, match="client must be one of those who train in fed_avg, of 0 to"
    ):
        fc.models_of_client(run, outcome, 4)
    with pytest.raises(ValueError, match="client must be at least 0, got -1"):
        fc.models_of_client(run, outcome, -1)
    with pytest.raises(TypeError, match="outcome must be an Outcome, got"):
        fc.models_of_client(run, outcome.variables, 0)


def test_measuring_clients_changes_nothing_of_the_training(dealt):
    train, test = dealt
    plain = fc.run_experiment(experiment(train, teachers(train)), show_progress=False)
    measured = fc.run_experiment(
        experiment(train, teachers(train), client_splits={"own": test}), show_progress=False
    )
    jax.tree.map(np.testing.assert_array_equal, plain.variables, measured.variables)


def test_every_clients_numbers_are_in_a_file_that_a_finished_run_reads(dealt, tmp_path):
    train, test = dealt
    run = lambda: fc.run_experiment(
        experiment(train, two_pools(train), client_splits={"own": test}),
        tmp_path,
        show_progress=False,
    )
    first = run()
    written = (tmp_path / CLIENTS).read_bytes()
    again = run()
    assert (tmp_path / CLIENTS).read_bytes() == written
    for model, measured in first.clients["own"].items():
        np.testing.assert_array_equal(
            measured.metrics["loss"], again.clients["own"][model].metrics["loss"]
        )
    assert load_clients(tmp_path / CLIENTS).keys() == {"own"}
    (tmp_path / CLIENTS).write_bytes(written[:100])
    with pytest.raises(ValueError, match=r"clients\.npz is damaged"):
        load_clients(tmp_path / CLIENTS)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (lambda train, test: {"everybody": test}, "must have a name that no other split has"),
        (lambda train, test: {"own": test.select([0, 2])}, "must have the 5 clients"),
        (lambda train, test: {"own": test.columns}, "must be a ClientSplit or FederatedData"),
        (
            lambda train, test: {
                "own": FederatedData(test.columns, test.offsets, list("01243"), True)
            },
            r"in the same order: client 3 is '3' there and '4' here",
        ),
        (lambda train, test: {"own": ClientSplit(test, test)}, "must have an example of every"),
        (lambda train, test: {"own": ClientSplit(test, train.select([0]))}, "the 1 clients of"),
        (lambda train, test: [test], "client_splits must be ClientSplits or FederatedData by name"),
    ],
)
def test_bad_client_splits_are_named(dealt, splits, message):
    train, test = dealt
    with pytest.raises((ValueError, TypeError), match=message):
        fc.run_experiment(
            experiment(train, two_pools(train), client_splits=splits(train, test)),
            show_progress=False,
        )


@pytest.mark.parametrize("metric", ["recall/spam", "client", "examples"])
def test_metrics_whose_names_the_file_of_clients_cannot_hold(dealt, metric):
    train, test = dealt
    model = MODEL._replace(metrics={metric: accuracy()})
    algorithm = two_pools(train, fc.fed_avg(model, TRAINING))
    with pytest.raises(
        ValueError, match=f"'large' must not be named '{metric}' with client_splits"
    ):
        fc.run_experiment(
            experiment(train, algorithm, client_splits={"own": test}), show_progress=False
        )


def test_metrics_that_no_client_has_are_null_and_so_is_a_diverged_loss():
    of_two = lambda values: np.array([values, [0.5, 0.5]])
    measured = ClientMetrics(
        np.arange(2),
        np.array([3, 5]),
        {"precision": of_two([np.nan, np.nan]), "loss": of_two([1.0, np.inf])},
    )
    first, second = client_records(4, {"own": {"model": measured}}, np.arange(2))
    assert set(first) == set(second)  # so a seed's values keep their place in the summary
    assert first["precision"] is first["precision_std"] is first["precision_weighted"] is None
    assert first["loss"] is None and second["loss"] == 0.5


def test_labels_of_client_splits_are_checked(dealt):
    train, test = dealt
    columns = {**test.columns, "label": test.columns["label"] + 3}
    wrong = FederatedData(columns, test.offsets, test.client_ids, allow_empty=True)
    with pytest.raises(ValueError, match="'own'"):
        fc.run_experiment(
            experiment(train, two_pools(train), client_splits={"own": wrong}), show_progress=False
        )


def test_a_pool_without_any_measured_client_is_named(dealt):
    train, test = dealt
    algorithm = two_pools(train, clients=(np.arange(5), np.array([1])))._replace()
    with pytest.raises(ValueError, match="an example of a client of 'small'"):
        fc.run_experiment(
            experiment(train, algorithm, client_splits={"own": test}), show_progress=False
        )


def test_methods_with_private_parts_are_fine_tuned_as_a_whole(dealt):
    train, test = (
        FederatedData(
            {"image": part.columns["x"], "label": part.columns["label"]},
            part.offsets,
            part.client_ids,
            allow_empty=True,
        )
        for part in dealt
    )
    model = fc.headed(nn.Dense(6), jnp.zeros((1, 4)), classes=CLASSES)
    one_step = LocalTraining(batch_size=64)
    rates = fc.FedAvgHyper(client_learning_rate=0.3)
    pools = {
        "babu": fc.Pool(fc.fed_babu(model, one_step, hyper=rates), np.arange(5), 2),
        "per": fc.Pool(fc.compressed(fc.fed_per(model, one_step, hyper=rates), 4), np.arange(5), 2),
    }
    outcome = fc.run_experiment(
        experiment(
            train,
            fc.independent_pools(pools, train.columns),
            final_client_splits={"own": test},
            seeds=1,
        ),
        show_progress=False,
    )
    measured = outcome.clients["own"]
    assert set(measured) == {"babu", "babu_fine_tuned", "per", "per_personal"} | {
        "per_personal_fine_tuned"
    }
    shared = of_seed(outcome.variables["babu"], 0)
    for place, client in enumerate(measured["babu_fine_tuned"].clients):
        own = train.client(int(client))

        def loss(params, own=own):
            outputs = model.apply(shared._replace(params=params), own)[0]
            labels = own["label"]
            return -jax.nn.log_softmax(outputs.logits)[jnp.arange(len(labels)), labels].mean()

        # FedBABU's head, which never changes in a round, takes the step too.
        params = jax.tree.map(
            lambda p, g: p - 0.3 * g, shared.params, jax.grad(loss)(shared.params)
        )
        tested = test.client(int(client))
        outputs = model.apply(shared._replace(params=params), tested)[0]
        log_probabilities = np.asarray(jax.nn.log_softmax(outputs.logits))
        expected = -log_probabilities[np.arange(len(tested["label"])), tested["label"]].mean()
        found = measured["babu_fine_tuned"].metrics["loss"][0, place]
        assert found == pytest.approx(expected, rel=1e-4)
    losses = {name: measured[name].metrics["loss"] for name in measured if name.startswith("per")}
    assert (losses["per_personal"] != losses["per_personal_fine_tuned"]).all()


def test_a_party_that_never_trains_has_no_model(data):
    seen, unseen = unseen_clients(data.select([0, 2, 3, 4]), 2)
    train, _ = train_test_within_clients(seen, 0.3)
    of_unseen, test = train_test_within_clients(unseen, 0.3)
    algorithm = fc.local_only({"all": fc.PartyGroup(MODEL, [0, 1])}, TRAINING)
    splits = {"unseen": ClientSplit(test, of_unseen)}
    message = (
        r"data\.unseen_clients must be None in a config\): a client who takes no part has no model"
    )
    with pytest.raises(ValueError, match=message):
        fc.run_experiment(experiment(train, algorithm, client_splits=splits), show_progress=False)
