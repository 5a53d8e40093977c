"""Values that an experiment's programs cannot use are refused before anything compiles."""

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedcodist as fc
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.metrics import accuracy, precision
from fedcodist.core.readout import Readout
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.splits import federated_splits
from fedcodist.run.experiment import Experiment, check_experiment, run_experiment
from fedcodist.run.sources import StreamedData, resident_data
from fedcodist.text.next_token import language_model, next_tokens
from fedcodist.text.ranking import ranking_loss, ranking_metrics

pytestmark = pytest.mark.usefixtures("compile_quickly")

ROWS, CLASSES = 12, 3
IMAGES = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
LABELS = np.arange(ROWS) % CLASSES
AS_IT_IS = lambda batch, key, positions: batch


def federated(columns, clients=2):
    rows = len(next(iter(columns.values())))
    return FederatedData.from_arrays(
        columns, offsets=np.linspace(0, rows, clients + 1).astype(int), allow_empty=True
    )


def examples(labels=LABELS, images=IMAGES, name="label"):
    return federated({"image": images, name: labels})


def experiment(
    train=None,
    splits=None,
    source=resident_data,
    preprocess=AS_IT_IS,
    data_sets=None,
    model=None,
    **settings,
):
    train = examples() if train is None else train
    model = model or from_flax_linen(
        nn.Dense(CLASSES), jnp.zeros((1, 4)), **settings.pop("of_model", {})
    )
    method = fc.fed_avg(model, fc.LocalTraining(batch_size=4, preprocess=preprocess))
    pool = fc.Pool(method, np.arange(train.num_clients), 2)
    algorithm = independent_pools({"main": pool}, train.columns)
    return Experiment(
        algorithm,
        source(train, data_sets),
        {"test": examples()} if splits is None else splits,
        rounds=1,
        evaluation_preprocess=preprocess,
        **settings,
    )


def told(**settings) -> str:
    """The error of an experiment, which is one line and comes before anything compiles."""
    made, compiled = experiment(**settings), []

    def listen(event, duration, **_):
        compiled.extend([event] if event.endswith("backend_compile_duration") else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises((ValueError, TypeError)) as caught:
            check_experiment(made)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert "\n" not in str(caught.value)
    return str(caught.value)


WRONG = {
    "-1 for none": (np.where(LABELS == 1, -1, LABELS), "got -1 to 2"),
    "255 for none": (np.where(LABELS == 1, 255, LABELS).astype(np.uint8), "got 0 to 255"),
    "counted from 1": (LABELS + 1, "got 1 to 3"),
}


@pytest.mark.parametrize("source", [resident_data, StreamedData])
@pytest.mark.parametrize("name", WRONG)
def test_labels_without_an_output(name, source):
    labels, got = WRONG[name]
    allowed = "must have whole numbers from 0 to 2, one for each of the 3 outputs of"
    line = told(train=examples(labels), source=source)
    assert (
        line.startswith(f"column 'label' of the clients' data {allowed} the model") and got in line
    )
    bad = {"unseen": examples(labels)}
    for settings in ({"splits": bad}, {"final_splits": bad}):
        line = told(source=source, **settings)
        assert line.startswith(f"column 'label' of split 'unseen' {allowed} model 'main'")
        assert got in line


def softmax_of_y(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["y"])


def hinge(outputs, batch):
    return jnp.sum(outputs * (1 - 2 * jax.nn.one_hot(batch["y"], CLASSES)), axis=-1)


@pytest.mark.parametrize(
    "of_model",
    [
        {"loss": softmax_of_y, "metrics": {"accuracy": accuracy("y")}},
        {"loss": hinge, "metrics": {"accuracy": accuracy("y")}},
        {
            "loss": lambda outputs, batch: jnp.sum(outputs, -1) ** 2,
            "metrics": {"precision": precision(label="y")},
        },
        {
            "loss": lambda outputs, batch: jnp.sum(outputs, -1) ** 2,
            "metrics": {"logit": lambda o, b: (o[jnp.arange(len(o)), b["y"]], jnp.ones(len(o)))},
        },
    ],
)
def test_every_loss_and_metric_that_indexes_by_class(of_model):
    train = examples(name="y")
    check_experiment(experiment(train, {"test": train}, of_model=of_model))
    line = told(train=train, splits={"test": examples(LABELS - 1, name="y")}, of_model=of_model)
    assert line.startswith("column 'y' of split 'test'") and "got -1 to 1" in line


@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_float_labels_that_are_cast_are_checked_too(source):
    as_whole = lambda batch, key, positions: {**batch, "label": batch["label"].astype(jnp.int32)}
    good = examples(LABELS.astype(np.float32))
    check_experiment(experiment(good, {"test": good}, preprocess=as_whole, source=source))
    bad = examples(np.where(LABELS == 1, -1.0, LABELS).astype(np.float32))
    line = told(train=good, splits={"test": bad}, preprocess=as_whole, source=source)
    assert line.startswith("column 'label' of split 'test' must have whole numbers from 0 to 2")
    assert "got -1 to 2" in line


class Heads(nn.Module):
    """Two heads, of categories in two columns of the inputs."""

    @nn.compact
    def __call__(self, x):
        categories = x[:, :2].astype(jnp.int32)
        embedded = [nn.Embed(n, 2)(categories[:, c]) for c, n in enumerate((4, 50))]
        x = jnp.concatenate([*embedded, x[:, 2:]], axis=1)
        return nn.Dense(2)(x), nn.Dense(5)(x)


def losses_of_heads(outputs, batch):
    label = batch["label"]
    return sum(
        optax.softmax_cross_entropy_with_integer_labels(logits, label[:, head])
        for head, logits in enumerate(outputs)
    )


def right_of_heads(outputs, batch):
    right = [logits.argmax(-1) == batch["label"][:, h] for h, logits in enumerate(outputs)]
    return jnp.mean(jnp.stack(right), axis=0), jnp.ones(len(batch["label"]))


def test_entries_of_an_example_are_checked_apart():
    rows = np.arange(ROWS)
    labels = np.stack([rows % 2, rows % 5], axis=1)
    inputs = np.stack([rows % 4, 4 * rows, rows / 7, 1000 * rows], axis=1).astype(np.float32)
    metrics = {"right": right_of_heads}
    model = from_flax_linen(Heads(), jnp.zeros((1, 4)), loss=losses_of_heads, metrics=metrics)
    good = examples(labels, inputs)
    check_experiment(experiment(good, {"test": good}, model=model))
    shifted = lambda values, entry, by: values + by * (np.arange(values.shape[1]) == entry)
    for changed, name, place, entries in (
        (shifted(inputs, 1, 10), "image", "got 10 to 54 in [:, 1]: ", 50),
        (shifted(inputs, 0, 1), "image", "got 1 to 4 in [:, 0]: ", 4),
        (shifted(labels, 0, 1), "label", "got 1 to 2 in [:, 0]: ", 2),
        (shifted(labels, 1, -1), "label", "got -1 to 3 in [:, 1]: ", 5),
    ):
        columns = (changed, inputs) if name == "label" else (labels, changed.astype(np.float32))
        bad = examples(*columns)
        for settings in ({"train": bad}, {"splits": {"test": bad}}):
            line = told(**{"train": good, "splits": {"test": good}} | settings, model=model)
            assert line.startswith(f"column {name!r} of ") and place in line
            assert f"must have whole numbers from 0 to {entries - 1}, " in line


def test_a_metric_may_look_at_the_first_few_classes_only():
    of_first = lambda o, b: (jnp.isin(b["label"], jnp.arange(2)) * 1.0, jnp.ones(len(o)))
    train = examples()
    check_experiment(experiment(train, {"test": train}, of_model={"metrics": {"first": of_first}}))


def test_targets_that_are_no_classes_may_be_any_numbers():
    settings = {
        "of_model": {
            "loss": lambda outputs, batch: (outputs[:, 0] - batch["label"]) ** 2,
            "metrics": {"error": lambda o, b: (abs(o[:, 0] - b["label"]), jnp.ones(len(o)))},
        }
    }
    ages = examples(LABELS * 30 - 5)
    check_experiment(experiment(ages, {"test": ages}, **settings))


def test_preprocessing_that_shifts_labels_is_seen_through():
    from_one = lambda batch, key, positions: {**batch, "label": batch["label"] - 1}
    shifted = examples(LABELS + 1)
    check_experiment(experiment(shifted, {"test": shifted}, preprocess=from_one))
    line = told(train=shifted, splits={"test": examples(LABELS)}, preprocess=from_one)
    assert line.startswith("column 'label' of split 'test' must have whole numbers from 1 to 3")
    line = told(train=examples(LABELS), splits={"test": shifted}, preprocess=from_one)
    assert line.startswith(
        "column 'label' of the clients' data must have whole numbers from 1 to 3"
    )


def test_labels_that_preprocessing_replaces_are_not_refused():
    without = lambda batch, key, positions: {**batch, "label": jnp.maximum(batch["label"], 0)}
    marked = examples(np.where(LABELS == 1, -1, LABELS))
    check_experiment(experiment(marked, {"test": marked}, preprocess=without))


class Words(nn.Module):
    vocabulary: int = 9

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, 4)(tokens)
        kernel = self.param("kernel", nn.initializers.zeros, (4, self.vocabulary))
        return Readout(x, kernel, jnp.zeros(self.vocabulary), jnp.ones(tokens.shape))


@pytest.mark.parametrize("token", [9, -1])
def test_tokens_beyond_the_vocabulary(token):
    tokens = np.random.default_rng(1).integers(0, 9, (ROWS, 6))
    wrong = tokens.copy()
    wrong[5, 3] = token
    good, bad = federated({"tokens": tokens}), federated({"tokens": wrong})
    settings = {"model": language_model(Words(), 9), "preprocess": next_tokens}
    check_experiment(experiment(good, {"test": good}, **settings))
    for line in (
        told(train=bad, splits={"test": good}, **settings),
        told(train=good, splits={"test": bad}, **settings),
    ):
        assert line.startswith("column 'tokens' of ") and "whole numbers from 0 to 8" in line


def test_unlabelled_tokens_of_a_data_set():
    tokens = np.random.default_rng(1).integers(0, 9, (ROWS, 6))
    train = federated({"tokens": tokens})
    model = language_model(Words(), 9)
    pools = {
        name: fc.Pool(
            fc.fed_avg(model, fc.LocalTraining(batch_size=4, preprocess=next_tokens)),
            np.arange(2),
            2,
        )
        for name in ("one", "two")
    }
    distillation = fc.Distillation(
        optimizer=optax.sgd,
        steps=1,
        batch_size=4,
        preprocess=next_tokens,
        inputs="tokens",
        mixup_beta=0,
    )
    algorithm = fc.periodic_codistillation(
        pools, train.columns, ROWS, 1, period=1, distillation=distillation
    )
    wrong = np.where(np.arange(ROWS)[:, None] == 7, 9, tokens)
    for unlabelled, is_right in ((tokens, True), (wrong, False)):
        made = Experiment(
            algorithm,
            resident_data(train, {"unlabelled": {"tokens": unlabelled}}),
            {"test": train},
            rounds=1,
            evaluation_preprocess=next_tokens,
        )
        if is_right:
            check_experiment(made)
        else:
            with pytest.raises(
                ValueError, match=r"column 'tokens' of data set 'unlabelled' .* 0 to 9"
            ):
                check_experiment(made)


def test_the_clicked_one_is_among_the_candidates():
    columns = {"image": np.zeros((ROWS, 4), np.float32), "label": LABELS}
    of_model = {"loss": ranking_loss, "metrics": ranking_metrics()}
    tested = federated({"image": columns["image"], "label": np.tile([1, 0, -1], (ROWS, 1))})
    check_experiment(experiment(federated(columns), {"test": tested}, of_model=of_model))
    line = told(
        train=federated(columns | {"label": LABELS + 1}), splits={"test": tested}, of_model=of_model
    )
    assert line.startswith(
        "column 'label' of the clients' data must have whole numbers from 0 to 2"
    )


@pytest.mark.parametrize("value", [2, -2, 100, 0.5, np.nan])
def test_clicks_are_1_0_or_padding(value):
    clicks = np.tile(np.array([1, 0, -1], np.float32), (ROWS, 1))
    clicks[7, 1] = value
    clicks = clicks.astype(np.int32) if float(value).is_integer() else clicks
    of_model = {"loss": ranking_loss, "metrics": ranking_metrics()}
    line = told(splits={"test": examples(clicks)}, of_model=of_model)
    assert line.startswith("column 'label' of split 'test' must have 1 for candidates that were ")
    assert line.endswith(f"-1 for padding, got {clicks[7, 1]} in row 7.")
    right = examples(np.tile([1, 0, -1], (ROWS, 1)))
    line = told(train=examples(clicks), splits={"test": right}, of_model=of_model)
    assert line.startswith(
        "column 'label' of the clients' data must have 1 for candidates that were "
    )


def test_validation_data_within_a_round():
    model = from_flax_linen(nn.Dense(CLASSES), jnp.zeros((1, 4)))
    method = fc.fed_avg(model, fc.LocalTraining(batch_size=4))
    train = examples()
    algorithm = fc.fed_df(
        {"main": fc.Pool(method, np.arange(2), 2)},
        train.columns,
        ROWS,
        fc.Distillation(optimizer=optax.sgd, steps=1, batch_size=4, mixup_beta=0),
        validation=fc.FedDFValidation(
            fc.ValidationData(ROWS, 4), every=1, patience=1, or_start=True
        ),
    )
    for labels in (LABELS, LABELS + 1):
        made = Experiment(
            algorithm,
            resident_data(
                train,
                {"unlabelled": {"image": IMAGES}, "validation": {"image": IMAGES, "label": labels}},
            ),
            {"test": train},
            rounds=1,
        )
        if labels is LABELS:
            check_experiment(made)
            continue
        with pytest.raises(ValueError, match=r"column 'label' of data set 'validation' .* 1 to 3"):
            check_experiment(made)


@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_whole_numbers_beyond_32_bits(source):
    times = np.full(ROWS, 1_700_000_000_000)
    late = federated({"image": IMAGES, "label": LABELS, "time": times})
    start = r"^column 'time' of {} must have whole numbers from -2147483648 to 2147483647.*int64"
    with pytest.raises(ValueError, match=start.format("the clients' data")):
        source(late)
    with pytest.raises(ValueError, match=start.format(r"data_sets\['unlabelled'\]")):
        source(examples(), {"unlabelled": {"image": IMAGES, "time": times}})
    for settings in ({"splits": {"late": late}}, {"final_splits": {"late": late}}):
        assert re.match(start.format("split 'late'"), told(source=source, **settings))
    with pytest.raises(ValueError, match=r"from 0 to 4294967295.*uint64"):
        source(federated({"image": IMAGES, "hash": np.full(ROWS, 2**40, np.uint64)}))


def test_64_bit_columns_of_small_numbers_are_fine():
    columns = {"image": IMAGES, "label": LABELS, "hash": np.full(ROWS, 2**32 - 1, np.uint64)}
    columns["least"] = np.full(ROWS, -(2**31))
    check_experiment(experiment(federated(columns), {"test": federated(columns)}))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_not_finite(value):
    images = IMAGES.copy()
    images[7, 2] = value
    line = told(train=examples(images=images))
    assert line.startswith("column 'image' of the clients' data must have finite numbers")
    assert f"got {value} in row 7 (client 1)" in line
    line = told(splits={"odd": examples(images=images)})
    assert line.startswith("column 'image' of split 'odd'") and "(client 1)" in line


@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_a_client_is_told_by_its_own_id(source):
    images = IMAGES.copy()
    images[7, 2] = np.nan
    columns = {"image": images, "label": LABELS}
    named = FederatedData.from_arrays(columns, offsets=[0, 6, ROWS], client_ids=["ann", "bob"])
    assert "in row 7 (client 'bob')" in told(train=named, source=source)
    assert "in row 7 (client 'bob')" in told(splits={"odd": named}, source=source)


def test_float64_that_overflows():
    line = told(
        train=examples(images=np.where(IMAGES[3, 1] == IMAGES, 1e300, IMAGES.astype(float)))
    )
    assert "got 1e+300, beyond float32 in row 3 (client 0)" in line


def test_nan_that_nobody_reads_or_that_is_asked_for():
    missing = np.full(ROWS, np.nan, np.float32)
    unread = federated({"image": IMAGES, "label": LABELS, "age": missing})
    check_experiment(experiment(unread, {"test": unread}))
    filled = lambda batch, key, positions: {**batch, "image": jnp.nan_to_num(batch["image"])}
    images = examples(images=np.where(IMAGES > 1, np.nan, IMAGES))
    check_experiment(experiment(images, {"test": images}, preprocess=filled))


def test_vectors_that_are_not_one_hot():
    shares = np.eye(CLASSES, dtype=np.float32)[LABELS]
    check_experiment(experiment(examples(shares), {"test": examples(shares)}))
    shares[4] = [0.5, 0.5, 0]
    line = told(splits={"soft": examples(shares)})
    assert line.startswith("column 'label' of split 'soft'")
    assert "[0.5, 0.5, 0.0] in row 4" in line


def test_a_method_that_reads_classes_beside_the_loss_says_so():
    """FedProto has a prototype per class, whatever the loss."""
    sigmoid = lambda outputs, batch: optax.sigmoid_binary_cross_entropy(
        outputs, batch["label"]
    ).mean(-1)
    error = lambda outputs, batch: (sigmoid(outputs, batch), jnp.ones(len(batch["label"])))
    model = fc.headed(
        nn.Dense(2), jnp.zeros((1, 4)), CLASSES, loss=sigmoid, metrics={"error": error}
    )
    several = np.eye(CLASSES, dtype=np.float32)[LABELS]
    several[4] = 1
    train = examples(several)
    algorithm = fc.fed_proto(
        {"one": fc.PartyGroup(model, np.arange(2))}, CLASSES, fc.LocalTraining(batch_size=4)
    )
    with pytest.raises(ValueError, match=r"in row 4: the method itself needs one class per exa"):
        check_experiment(Experiment(algorithm, resident_data(train), {"test": train}, rounds=1))


def test_large_columns_are_looked_at_in_parts(tmp_path, monkeypatch):
    from fedcodist.data import column_values

    monkeypatch.setattr(column_values, "_CHUNK_BYTES", 64)
    path = tmp_path / "column.npy"
    np.save(path, np.arange(1000, dtype=np.int64) - 7)
    assert column_values.least_and_largest(np.load(path, mmap_mode="r")) == (-7, 992)
    np.save(path, np.where(np.arange(1000).reshape(500, 2) == 733, np.inf, 1))
    assert column_values.first_not_finite(np.load(path, mmap_mode="r")) == (366, np.inf)
    assert column_values.least_and_largest(np.zeros((0, 3), np.int64)) is None


@pytest.mark.parametrize("form", ["columns", "lists"])
def test_a_split_of_plain_columns_is_one_client_s(form):
    columns = {"image": IMAGES, "label": LABELS}
    if form == "lists":
        columns = {name: column.tolist() for name, column in columns.items()}
    check_experiment(experiment(splits={"test": columns}, final_splits={"last": columns}))
    split = federated_splits("splits", {"test": columns})["test"]
    assert split.client_ids.tolist() == ["test"] and split.num_examples == ROWS
    np.testing.assert_allclose(split.columns["image"], IMAGES)


def test_a_split_that_is_no_table_is_one_line():
    assert told(splits={"test": IMAGES}).startswith(
        "splits['test'] must be FederatedData, or columns"
    )
    line = told(final_splits={"last": {"image": IMAGES, "label": LABELS[:3]}})
    assert line.startswith("final_splits['last']: columns must have equal numbers of examples")
    assert told(splits=[IMAGES]).startswith("splits must be a mapping from names to data")


@pytest.mark.parametrize("source", [resident_data, StreamedData])
def test_data_sets_in_other_plain_forms(source):
    expected = source(examples(), {"unlabelled": {"image": IMAGES}}).data_sets
    for given in (federated({"image": IMAGES}), {"image": IMAGES.tolist()}):
        found = source(examples(), {"unlabelled": given}).data_sets
        np.testing.assert_allclose(found["unlabelled"]["image"], expected["unlabelled"]["image"])
    with pytest.raises(TypeError, match=r"^data_sets\['unlabelled'\] must be columns, a mapping"):
        source(examples(), {"unlabelled": IMAGES})
    with pytest.raises(ValueError, match=r"^data_sets\['unlabelled'\] must have columns of equal"):
        source(examples(), {"unlabelled": {"image": IMAGES, "age": np.zeros(3)}})


FORMS = {
    "[rows, 1]": LABELS[:, None],
    "one-hot": np.eye(CLASSES, dtype=np.float32)[LABELS],
    "bool": LABELS > 0,
    "uint64": LABELS.astype(np.uint64),
}


@pytest.mark.parametrize("form", FORMS)
def test_labels_in_other_plain_forms_are_accepted(form):
    labels = examples(FORMS[form])
    check_experiment(experiment(labels, {"test": labels}, final_splits={"last": labels}))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_labels_in_other_plain_forms_train_as_whole_numbers(form):
    labels = FORMS[form]
    whole = LABELS if labels.dtype != bool else (LABELS > 0).astype(int)
    found = [
        run_experiment(experiment(examples(own), {"test": examples(own)}), show_progress=False)
        for own in (whole, labels)
    ]
    assert found[0].records == found[1].records
    jax.tree.map(np.testing.assert_array_equal, *(each.variables for each in found))


def test_labels_of_another_type_are_one_line():
    with pytest.raises(
        ValueError, match=r"^column 'label' must have labels that are whole numbers"
    ):
        check_experiment(experiment(examples(LABELS.astype(np.float32))))


BYTES = np.random.default_rng(3).integers(0, 256, (ROWS, 4)).astype(np.uint8)
scaled = lambda batch, key, positions: {**batch, "image": batch["image"] / 255}


def trained_on_scaled_bytes(data_sets=None, **settings):
    """An experiment whose clients scale bytes in training."""
    train = examples(images=BYTES)
    model = from_flax_linen(nn.Dense(CLASSES), jnp.zeros((1, 4)))
    method = fc.fed_avg(model, fc.LocalTraining(batch_size=4, preprocess=scaled))
    pool = fc.Pool(method, np.arange(2), 2)
    algorithm = independent_pools({"main": pool}, train.columns)
    return Experiment(algorithm, resident_data(train, {}), {"test": train}, 1, **settings)


def test_bytes_that_only_training_scales_are_warned_of():
    line = (
        r"^column 'image' reaches networks as uint8 on split 'test', and as float32 in training: "
        "evaluation_preprocess should scale it"
    )
    without = trained_on_scaled_bytes()
    for _ in range(2):  # also where JAX has traced the round before
        with pytest.warns(UserWarning, match=line):
            check_experiment(without)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_experiment(trained_on_scaled_bytes(evaluation_preprocess=scaled))


def test_bytes_that_a_distillation_does_not_scale_are_warned_of():
    train, images = examples(images=BYTES), {"image": BYTES}
    model = from_flax_linen(nn.Dense(CLASSES), jnp.zeros((1, 4)))
    method = fc.fed_avg(model, fc.LocalTraining(batch_size=4, preprocess=scaled))
    pools = {name: fc.Pool(method, np.arange(2), 2) for name in ("small", "large")}

    def with_distillation(**settings):
        distillation = fc.Distillation(steps=2, batch_size=4, mixup_beta=0, **settings)
        algorithm = fc.fed_df(pools, train.columns, ROWS, distillation)
        data = resident_data(train, {"unlabelled": images})
        return Experiment(algorithm, data, {"test": train}, 1, evaluation_preprocess=scaled)

    with pytest.warns(UserWarning, match="networks in training as float32 and as uint8: all"):
        check_experiment(with_distillation())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_experiment(with_distillation(preprocess=scaled))


def test_images_of_another_shape_than_the_clients_are_warned_of():
    """A network that flattens its inputs takes transposed images without a word."""

    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(CLASSES)(x.reshape(len(x), -1))

    images = np.zeros((ROWS, 2, 3, 1), np.float32)
    of = lambda images: examples(images=images)
    model = from_flax_linen(Flat(), jnp.zeros((1, 2, 3, 1)))
    made = lambda **more: experiment(of(images), model=model, **more)
    with pytest.warns(
        UserWarning, match=r"^split 'test' has images \[3, 2, 1\], .* \[2, 3, 1\]\.$"
    ):
        check_experiment(made(splits={"test": of(images.transpose(0, 2, 1, 3))}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_experiment(made(splits={"test": of(images)}))
        # Larger images, of which preprocessing takes a part.
        cropped = lambda batch, key, positions: {**batch, "image": batch["image"][:, :2, :3]}
        larger = of(np.zeros((ROWS, 5, 5, 1), np.float32))
        check_experiment(made(splits={"test": larger}, preprocess=cropped))
        # Those of evaluation are prepared in a way that the clients' cannot be.
        flat = of(np.zeros((ROWS, 6), np.float32))
        unflatten = lambda batch, key, positions: {
            **batch,
            "image": batch["image"].reshape(len(positions), 2, 3, 1),
        }
        wider = of(np.zeros((ROWS, 2, 4, 1), np.float32))
        narrowed = lambda batch, key, positions: {**batch, "image": batch["image"][:, :, :3]}
        made = experiment(wider, {"test": flat}, preprocess=narrowed, model=model)
        check_experiment(made._replace(evaluation_preprocess=unflatten))
