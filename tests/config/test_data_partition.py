"""`data.partition`: what configs name is what the library's partitions give."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from fedcodist.config.allowed_settings import ALLOWED
from fedcodist.config.data import load_data
from fedcodist.config.data_partition import PARTITIONS, merged, repartitioned
from fedcodist.config.settings import check_settings
from fedcodist.data import FederatedData, client_pools, feature_noise, feature_rotation, partition
from fedcodist.datasets.digits import load_digits_federated

SEED = 3
DRAWS = np.random.default_rng(0)
IMAGES, MIXED = DRAWS.integers(0, 256, (120, 4, 4, 1), np.uint8), DRAWS.permutation(120)
COLUMNS = {
    "image": IMAGES,
    "label": np.repeat(np.arange(6), 20)[MIXED],
    "coarse_label": np.repeat(np.arange(3), 40)[MIXED],
    "site": np.array(["b", "a", "c"] * 40),
}
LABELS = COLUMNS["label"]
CLIENTS = FederatedData.from_arrays(COLUMNS, offsets=np.arange(0, 121, 10))  # 12 of 10 examples


def dealt(seed=SEED, **settings):
    config = ConfigDict({"data": {"partition": settings}})
    check_settings(config)
    return repartitioned(CLIENTS, config.data.partition, seed, 255.0)


EXPECTED = {
    "iid": (dict(num_clients=5), lambda: partition.iid(120, 5, SEED)),
    "dirichlet": (
        dict(num_clients=5, concentration=0.5, min_size=3),
        lambda: partition.dirichlet(LABELS, 5, 0.5, SEED, 3),
    ),
    "equal_dirichlet": (
        dict(num_clients=4, concentration=10.0, together=2),
        lambda: partition.equal_dirichlet(LABELS, 4, 10.0, SEED, 2),
    ),
    "pachinko": (
        dict(num_clients=4, examples_per_client=20, root_concentration=1.0),
        lambda: partition.pachinko(LABELS, COLUMNS["coarse_label"], 4, 20, SEED, 1.0),
    ),
    "shards": (
        dict(num_clients=4, shards_per_client=2),
        lambda: partition.shards(LABELS, 4, 2, SEED),
    ),
    "pathological": (
        dict(num_clients=4, labels_per_client=3),
        lambda: partition.pathological(LABELS, 4, 3, SEED),
    ),
    "quantity_dirichlet": (
        dict(num_clients=4, concentration=0.5),
        lambda: partition.quantity_dirichlet(120, 4, 0.5, SEED),
    ),
    "quantity_log_normal": (
        dict(num_clients=4, sigma=1.0, min_size=2),
        lambda: partition.quantity_log_normal(120, 4, 1.0, SEED, 2),
    ),
    "natural": ({}, lambda: np.split(np.arange(120), 12)),
    "by_id": (dict(column="site"), lambda: partition.by_id(COLUMNS["site"])[1]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_config_gives_the_librarys_partition(name):
    settings, expected = EXPECTED[name]
    train = dealt(name=name, **settings)["train"]
    parts = expected()
    assert train.num_clients == len(parts) and "site" not in train.columns
    for index, part in enumerate(parts):
        np.testing.assert_array_equal(train.client(index)["image"], COLUMNS["image"][part])


def test_a_config_gives_the_balanced_dirichlet():
    train = dealt(name="dirichlet", num_clients=5, concentration=0.2, balanced=True)["train"]
    parts = partition.dirichlet(LABELS, 5, 0.2, SEED, balanced=True)
    np.testing.assert_array_equal(train.columns["image"], IMAGES[np.concatenate(parts)])


def test_whole_clients_are_merged():
    train = dealt(name="merge_clients", num_clients=4)["train"]
    assert train.client_sizes.tolist() == [30] * 4
    merged = client_pools.merge_clients(CLIENTS, 4, SEED)
    np.testing.assert_array_equal(train.columns["image"], merged.columns["image"])


def test_natural_clients_keep_their_names():
    assert dealt(name="by_id", column="site")["train"].client_ids.tolist() == ["a", "b", "c"]
    assert dealt(name="natural")["train"].client_ids.tolist() == CLIENTS.client_ids.tolist()


def test_every_partition_was_tried_and_its_settings_can_be_given():
    assert set(PARTITIONS) == {*EXPECTED, "merge_clients"}
    for settings, _ in EXPECTED.values():
        assert {f"data.partition.{name}" for name in settings} <= set(ALLOWED)


def test_features_differ_on_top_of_any_partition():
    plain = dealt(name="iid", num_clients=4)["train"]
    noised = dealt(name="iid", num_clients=4, feature_noise=0.2)["train"]
    expected = feature_noise(plain, 0.2, SEED, scale=255.0)
    np.testing.assert_array_equal(noised.columns["image"], expected.columns["image"])
    both = dealt(name="iid", num_clients=4, feature_noise=0.2, feature_rotations=4)["train"]
    expected = feature_noise(feature_rotation(plain, 4, SEED), 0.2, SEED, scale=255.0)
    np.testing.assert_array_equal(both.columns["image"], expected.columns["image"])


def test_examples_set_apart_are_not_changed():
    splits = dealt(name="natural", validation=0.25, feature_noise=0.5)
    apart = [image.tobytes() for image in splits["validation"].columns["image"]]
    assert len(apart) == 30 and set(apart) <= {image.tobytes() for image in IMAGES}
    assert splits["train"].num_examples == 90


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(name="pathological", num_clients=4),
            "the config lacks 'data.partition.labels_per_cl",
        ),
        (
            dict(name="pathological", num_clients=4, labels_per_client=7),
            r"data.partition.labels_per_client must be an integer in 2\.\.6, for 4 clients and 6 labels",
        ),
        (dict(name="pathologic", num_clients=4), r"data.partition.name must be one of \['by_id', "),
        (
            dict(name="iid", num_clients=121),
            r"data.partition.num_clients must be an integer in 1\.\.1",
        ),
        (dict(name="by_id", column="user"), "data.partition.column must be one of"),
        (dict(name="by_id", column="image"), "ids must be a non-empty vector"),
        (
            dict(name="iid", num_clients=60, concentration=0.1),
            r"^data\.partition\.concentration is not a setting of iid, which has num_clients\.$",
        ),
        (
            dict(name="dirichlet", num_clients=6, concentration=0.1, shards_per_client=2),
            r"^data\.partition\.shards_per_client is not a setting of dirichlet, which has bala",
        ),
        (
            dict(name="natural", num_clients=6),
            r"^data\.partition\.num_clients is not a setting of natural, which has none\.$",
        ),
        (dict(name="iid", num_clients=2, shard=3), "data.partition.shard is not a setting of iid"),
        (
            dict(name="iid", num_clients=2, feature_noise=-1),
            "data.partition.feature_noise must be at",
        ),
        (
            dict(name="iid", num_clients=2, feature_rotations=5),
            "data.partition.feature_rotations must",
        ),
        (
            dict(name="quantity_log_normal", num_clients=2, sigma=200.0),
            "data.partition.sigma must be",
        ),
        (
            dict(name="natural", all_splits=True),
            r"^data\.partition\.all_splits must be False with data\.partition\.name='natural', which r",
        ),
        (
            dict(name="merge_clients", num_clients=2, all_splits=True),
            r"^data\.partition\.all_splits must be False with data\.partition\.name='merge_clients'",
        ),
    ],
)
def test_mistakes_are_one_line_that_names_the_setting(settings, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        dealt(**settings)
    assert "\n" not in str(error.value)


def test_a_partition_has_no_seed_of_its_own():
    settings = ConfigDict(dict(name="iid", num_clients=2, seed=5))
    with pytest.raises(
        ValueError, match=r"^data\.partition\.seed is no setting: .* data\.seed\. [^\n]*$"
    ):
        repartitioned(CLIENTS, settings, SEED, 255.0)


def test_a_missing_column_of_labels_is_named():
    config = ConfigDict(dict(name="pachinko", num_clients=2, examples_per_client=5))
    without = CLIENTS.drop("coarse_label")
    with pytest.raises(ValueError, match="'pachinko' needs a column 'coarse_label', the data have"):
        repartitioned(without, config, SEED, 255.0)


def test_digits_are_dealt_anew():
    settings = ConfigDict(dict(name="digits", num_clients=30, concentration=0.5, seed=SEED))
    before = load_data(settings)
    settings.partition = dict(name="pathological", num_clients=20, labels_per_client=2)
    settings.partition.feature_noise = 0.1
    after = load_data(settings)
    train, labels = after.splits["train"], after.splits["train"].columns["label"]
    assert train.num_clients == 20
    assert all(len(np.unique(client["label"])) == 2 for _, client in train.clients())
    assert sorted(labels) == sorted(before.splits["train"].columns["label"])
    assert train.columns["image"].max() <= 16
    np.testing.assert_array_equal(after.unlabelled, before.unlabelled)
    np.testing.assert_array_equal(
        after.splits["test"].columns["image"], before.splits["test"].columns["image"]
    )
    # Without a partition digits are what they were.
    plain = load_digits_federated(num_clients=30, concentration=0.5, seed=SEED)["train"]
    np.testing.assert_array_equal(before.splits["train"].columns["image"], plain.columns["image"])


def test_all_splits_need_the_columns_of_the_training_split():
    unlabelled = FederatedData.from_arrays({"image": COLUMNS["image"]}, offsets=[0, 120])
    splits = {"distillation": unlabelled, "train": CLIENTS}
    with pytest.raises(
        ValueError,
        match=r"^data.partition.all_splits needs 'label' in every split, and 'distillation' has only "
        r"\['image'\]. Prepare the folder without 'distillation'.$",
    ):
        merged(splits)
    both = merged({"test": CLIENTS, "train": CLIENTS})
    assert both.num_clients == 1 and both.num_examples == 240 and set(both.columns) == set(COLUMNS)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        (
            "image",
            np.zeros((2, 5, 5, 1), np.uint8),
            r"uint8 \[5, 5, 1\], 'train' uint8 \[4, 4, 1\]",
        ),
        ("image", np.zeros((2, 4, 4, 1)), r"float64 \[4, 4, 1\], 'train' uint8 \[4, 4, 1\]"),
        ("label", np.eye(6, dtype=int)[:2], r"int64 \[6\], 'train' int64 \[\]"),
    ],
)
def test_all_splits_need_columns_of_one_kind(name, column, message):
    columns = {key: values[:2] for key, values in COLUMNS.items()} | {name: column}
    test = FederatedData.from_arrays(columns, offsets=[0, 2])
    with pytest.raises(
        ValueError, match=rf"^data.partition.all_splits needs '{name}' .* 'test' has {message}"
    ) as error:
        merged({"train": CLIENTS, "test": test})
    assert "\n" not in str(error.value)


def test_all_splits_may_have_integers_and_text_of_other_widths():
    columns = {**COLUMNS, "label": LABELS.astype(np.uint8), "site": COLUMNS["site"].astype("U9")}
    both = merged({"train": CLIENTS, "test": FederatedData.from_arrays(columns, offsets=[0, 120])})
    np.testing.assert_array_equal(both.columns["label"], np.tile(LABELS, 2))


def test_validation_of_data_without_clients_is_the_last_ones_unless_these_are_sorted_by_label():
    def splits(rows):
        columns = {name: column[rows] for name, column in COLUMNS.items()}
        data = FederatedData.from_arrays(columns, offsets=[0, 120])
        settings = ConfigDict(dict(name="iid", num_clients=4, validation=0.05))
        return repartitioned(data, settings, SEED, 255.0)

    mixed = np.random.default_rng(0).permutation(120)
    apart = splits(mixed)["validation"].columns["image"]
    np.testing.assert_array_equal(apart, IMAGES[mixed][-6:])
    for rows in (np.argsort(LABELS, kind="stable"), np.argsort(-LABELS, kind="stable")):
        with pytest.raises(ValueError, match=r"^data\.partition\.validation .* sorted by label"):
            splits(rows)


def test_validation_that_would_lack_a_common_label_is_refused():
    def splits(labels):
        data = FederatedData.from_arrays({"label": labels}, offsets=[0, len(labels)])
        settings = ConfigDict(dict(name="iid", num_clients=4, validation=0.1))
        return repartitioned(data, settings, SEED, 255.0)

    grouped = np.repeat([3, 1, 7], 200)
    message = (
        r"^data\.partition\.validation takes the last 60 examples, which have none of label 1, of "
        r"which about 22 would be among as many random ones: shuffle the data first\.$"
    )
    with pytest.raises(ValueError, match=message):
        splits(grouped)
    mixed = np.random.default_rng(0).permutation(grouped)
    assert set(splits(mixed)["validation"].columns["label"]) == {1, 3, 7}
    rare = np.concatenate([np.full(80, 5), mixed])  # 9 of label 5 are expected
    assert 5 not in splits(rare)["validation"].columns["label"]


def test_validation_of_one_hot_labels_that_are_sorted_is_refused_too():
    order = np.argsort(LABELS, kind="stable")
    columns = {"label": np.eye(LABELS.max() + 1, dtype=np.int32)[LABELS][order]}
    data = FederatedData.from_arrays(columns, offsets=[0, 120])
    settings = ConfigDict(dict(name="iid", num_clients=4, validation=0.05))
    with pytest.raises(ValueError, match=r"^data\.partition\.validation .* sorted by label"):
        repartitioned(data, settings, SEED, 255.0)


def test_clients_may_be_named_by_bytes():
    columns = {**COLUMNS, "site": np.char.encode(COLUMNS["site"], "utf-8")}
    data = FederatedData.from_arrays(columns, offsets=[0, 120])
    found = repartitioned(data, ConfigDict(dict(name="by_id", column="site")), SEED, 255.0)
    assert found["train"].client_ids.tolist() == ["a", "b", "c"]


@pytest.mark.parametrize("offsets", [[0, 120], [0, 60, 120]])
def test_a_share_of_no_example_is_no_validation(offsets):
    data = FederatedData.from_arrays(COLUMNS, offsets=offsets)
    settings = ConfigDict(dict(name="iid", num_clients=4, validation=0.001))
    message = r"^data\.partition\.validation must set some of the 120 examples apart, got 0\.001"
    with pytest.raises(ValueError, match=message):
        repartitioned(data, settings, SEED, 255.0)


def test_validation_by_id_is_drawn_from_all_ids_and_has_no_text():
    """Natural data are often in the order of the ids; the last rows would be those of two users."""
    users = np.repeat([f"u{user:02}" for user in range(20)], 6)
    data = FederatedData.from_arrays({**COLUMNS, "user": users}, offsets=[0, 120])
    settings = ConfigDict(dict(name="by_id", column="user", validation=0.1))
    splits = repartitioned(data, settings, SEED, 255.0)
    assert splits["train"].num_clients == 20 and splits["train"].num_examples == 108
    assert set(splits["validation"].columns) == {"image", "label", "coarse_label"}
    assert set(splits["train"].columns) == set(splits["validation"].columns)


@pytest.mark.parametrize("name", ["iid", "natural"])
def test_validation_of_data_that_lie_client_by_client_is_drawn_from_all_of_them(name):
    rows = np.argsort(LABELS, kind="stable")
    columns = {"image": IMAGES[rows], "label": LABELS[rows], "row": np.arange(120)}
    data = FederatedData.from_arrays(columns, offsets=np.arange(0, 121, 20))  # a label each
    settings = ConfigDict(dict(name=name, validation=0.25))
    settings.update({"num_clients": 4} if name == "iid" else {})
    splits = repartitioned(data, settings, SEED, 255.0)
    train, apart = splits["train"].columns, splits["validation"].columns
    assert len(apart["row"]) == 30 and set(apart["label"]) == set(range(6))
    assert (np.diff(apart["row"]) > 0).all()
    assert sorted([*train["row"], *apart["row"]]) == list(range(120))
    again, other = (repartitioned(data, settings, seed, 255.0) for seed in (SEED, SEED + 1))
    np.testing.assert_array_equal(apart["row"], again["validation"].columns["row"])
    assert set(apart["row"]) != set(other["validation"].columns["row"])
    if name == "natural":
        assert all(set(c["label"]) == {i} for i, (_, c) in enumerate(splits["train"].clients()))


def test_validation_of_all_splits_is_drawn_from_all_of_them():
    """The clients of 'train' are one client by then, and the test examples are the last ones."""
    columns = {"image": IMAGES, "label": LABELS, "row": np.arange(120)}
    splits = {
        "train": FederatedData.from_arrays(columns, offsets=[0, 40, 80, 120]),
        "test": FederatedData.from_arrays(
            {**columns, "row": np.arange(120, 240)}, offsets=[0, 120]
        ),
    }
    settings = ConfigDict(dict(name="iid", num_clients=4, all_splits=True, validation=0.25))
    apart = repartitioned(merged(splits), settings, SEED, 255.0)["validation"].columns["row"]
    assert len(apart) == 60
    assert all(np.sum(apart // 40 == part) >= 5 for part in range(6))  # ten on average


def test_natural_clients_whose_examples_are_all_set_apart_are_left_out():
    columns = {"label": LABELS[:20], "row": np.arange(20)}
    offsets = np.sort([*range(20), 5, 20])  # client 5 has no example, the others one each
    data = FederatedData.from_arrays(columns, offsets=offsets, allow_empty=True)
    settings = ConfigDict(dict(name="natural", validation=0.5))
    splits = repartitioned(data, settings, SEED, None)
    train, apart = splits["train"], splits["validation"]
    lost = {str(client) for client in data.client_ids[data.client_sizes > 0]}
    lost -= set(train.client_ids.tolist())
    assert len(lost) == apart.num_examples == 10 and train.num_clients == 11


def test_noise_of_floating_images_is_of_their_own_scale():
    images = np.full((400, 4, 4, 1), 0.5, np.float32)
    data = FederatedData.from_arrays({"image": images}, offsets=[0, 400])
    settings = ConfigDict(dict(name="iid", num_clients=2, feature_noise=0.1))
    noised = repartitioned(data, settings, SEED, None)["train"]
    np.testing.assert_allclose(np.std(noised.client(1)["image"]), 0.1, rtol=0.1)


def test_rotations_need_images():
    data = FederatedData.from_arrays({"image": np.zeros((8, 64), np.float32)}, offsets=[0, 8])
    settings = ConfigDict(dict(name="iid", num_clients=2, feature_rotations=2))
    with pytest.raises(
        ValueError, match=r"^data\.partition\.feature_rotations needs a column 'image'"
    ):
        repartitioned(data, settings, SEED, None)


def deals_nothing(labels):
    return None


def leaves_a_client_out(labels):
    return [np.arange(len(labels)), np.array([], int)]


def looks_too_far(labels):
    return labels[10**6]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deals_nothing", r"^data\.partition\.name .* must return a list with the .* got None"),
        ("leaves_a_client_out", r"^data\.partition: client '1' has no examples"),
        ("looks_too_far", r"^data\.partition '.*:looks_too_far': IndexError: .*partition.py, line"),
    ],
)
def test_mistakes_of_a_partition_of_ones_own_are_one_line(name, message):
    with pytest.raises(ValueError, match=message) as error:
        dealt(name=f"{__name__}:{name}")
    assert "\n" not in str(error.value)
