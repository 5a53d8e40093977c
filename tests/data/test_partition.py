import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import (
    FederatedData,
    by_id,
    capacity_pools,
    dirichlet,
    equal_dirichlet,
    iid,
    pachinko,
    pathological,
    quantity_dirichlet,
    quantity_log_normal,
    shards,
)

CIFAR_FINE = np.repeat(np.arange(100), 500)
CIFAR_COARSE = CIFAR_FINE // 5


@st.composite
def label_cases(draw):
    labels = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=80)))
    return labels, draw(st.integers(1, len(labels))), draw(st.integers(0, 2**31))


def assert_partition(parts, num_examples):
    """Every example is dealt exactly once, and every client has some."""
    assert all(len(part) for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(num_examples))


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def differs(first, second):
    return any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def label_table(parts, labels, num_labels):
    return np.stack([np.bincount(labels[part], minlength=num_labels) for part in parts])


@settings(max_examples=50)
@given(label_cases())
def test_iid_is_an_even_partition(case):
    labels, num_clients, seed = case
    parts = iid(len(labels), num_clients, seed)
    assert len(parts) == num_clients
    assert_partition(parts, len(labels))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert_same(parts, iid(len(labels), num_clients, seed))


@settings(max_examples=80)
@given(label_cases(), st.sampled_from([1e-300, 1e-4, 0.1, 1.0, 100.0, 1e300]), st.data())
def test_dirichlet_is_a_partition_with_minimum_sizes(case, concentration, data):
    labels, num_clients, seed = case
    min_size = data.draw(st.integers(1, len(labels) // num_clients))
    parts = dirichlet(labels, num_clients, concentration, seed, min_size)
    assert len(parts) == num_clients
    assert_partition(parts, len(labels))
    assert min(len(part) for part in parts) >= min_size
    assert_same(parts, dirichlet(labels, num_clients, concentration, seed, min_size))


@settings(max_examples=80)
@given(label_cases(), st.sampled_from([1e-300, 0.1, 1.0, 1e300]), st.data())
def test_balanced_dirichlet_gives_no_further_label_beyond_the_mean(case, concentration, data):
    labels, num_clients, seed = case
    min_size = data.draw(st.integers(1, len(labels) // num_clients))
    parts = dirichlet(labels, num_clients, concentration, seed, min_size, balanced=True)
    assert_partition(parts, len(labels))
    for part in parts:
        before_its_last_label = np.sum(labels[part] < labels[part].max())
        assert before_its_last_label < len(labels) / num_clients


@pytest.mark.parametrize("seed", range(3))
def test_balanced_dirichlet_is_a_plain_loop(seed):
    labels, clients = np.random.default_rng(9).integers(0, 10, 4000), [[] for _ in range(20)]
    rng = np.random.default_rng(seed)
    for label in range(10):
        examples = rng.permutation(np.flatnonzero(labels == label)).tolist()
        shares = rng.dirichlet([0.1] * 20).tolist()
        shares = [
            share if len(own) < 200 else 0.0 for share, own in zip(shares, clients, strict=True)
        ]
        taken = 0.0
        for client, share in enumerate(shares):
            start = round(taken / sum(shares) * len(examples))
            taken += share
            clients[client] += examples[start : round(taken / sum(shares) * len(examples))]
    parts = dirichlet(labels, 20, 0.1, seed, balanced=True)
    assert_same(parts, [np.sort(own) for own in clients])
    assert differs(parts, dirichlet(labels, 20, 0.1, seed))


@settings(max_examples=50)
@given(label_cases(), st.data())
def test_shards_is_an_even_partition_of_few_labels(case, data):
    labels, num_clients, seed = case
    shards_per_client = data.draw(st.integers(1, len(labels) // num_clients))
    parts = shards(labels, num_clients, shards_per_client, seed)
    assert len(parts) == num_clients
    assert_partition(parts, len(labels))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= shards_per_client
    assert_same(parts, shards(labels, num_clients, shards_per_client, seed))


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=60),
    st.sampled_from([1, 2, 3]),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.integers(0, 2**31),
    st.data(),
)
def test_pachinko_uses_no_row_twice(fine, branching, root, leaf, seed, data):
    fine = np.array(fine)
    num_clients = data.draw(st.integers(1, len(fine)))
    per_client = data.draw(st.integers(1, len(fine) // num_clients))
    arguments = (fine, fine // branching, num_clients, per_client, seed, root, leaf)
    parts = pachinko(*arguments)
    assert [len(part) for part in parts] == [per_client] * num_clients
    used = np.concatenate(parts)
    assert len(np.unique(used)) == len(used) and used.min() >= 0 and used.max() < len(fine)
    assert_same(parts, pachinko(*arguments))


@settings(max_examples=80)
@given(label_cases(), st.data())
def test_pathological_gives_each_client_its_number_of_labels(case, data):
    labels, num_clients, seed = case
    present, counts = np.unique(labels, return_counts=True)
    least = -(-len(present) // num_clients)
    labels_per_client = data.draw(st.integers(least, len(present)))
    arguments = (labels, num_clients, labels_per_client, seed)
    try:
        parts = pathological(*arguments)
    except ValueError as error:
        assert "clients without examples" in str(error) and counts.min() < num_clients
        return
    assert len(parts) == num_clients
    assert_partition(parts, len(labels))
    assert_same(parts, pathological(*arguments))
    table = label_table(parts, labels, 6)
    kinds = (table > 0).sum(axis=1)
    assert kinds.max() <= labels_per_client
    owners = (table > 0).sum(axis=0)[present]
    if counts.min() >= num_clients:
        assert set(kinds) == {labels_per_client}
        assert owners.max() - owners.min() <= 1
    for label in present:  # a label's examples are dealt evenly to its clients
        some = table[table[:, label] > 0, label]
        assert some.max() - some.min() <= 1


def test_pathological_pairs_of_labels_are_drawn():
    labels = np.repeat(np.arange(10), 100)
    tables = [label_table(pathological(labels, 5, 2, seed), labels, 10) > 0 for seed in range(50)]
    # Five clients of two labels each divide the ten labels; a pair comes up in 1 of 9 draws.
    assert all((table.sum(axis=0) == 1).all() for table in tables)
    together = np.mean([(table[:, 0] & table[:, 1]).any() for table in tables])
    assert 0.01 < together < 0.3


QUANTITIES = [(quantity_dirichlet, 1e-300), (quantity_dirichlet, 0.5), (quantity_dirichlet, 1e6)]
QUANTITIES += [(quantity_log_normal, sigma) for sigma in (0, 1.0, 100)]


@settings(max_examples=80)
@given(st.integers(1, 200), st.sampled_from(QUANTITIES), st.integers(0, 2**31), st.data())
def test_quantity_skew_is_a_partition_with_minimum_sizes(num_examples, case, seed, data):
    deal, parameter = case
    num_clients = data.draw(st.integers(1, num_examples))
    min_size = data.draw(st.integers(1, num_examples // num_clients))
    parts = deal(num_examples, num_clients, parameter, seed, min_size)
    assert len(parts) == num_clients
    assert_partition(parts, num_examples)
    assert min(len(part) for part in parts) >= min_size
    assert_same(parts, deal(num_examples, num_clients, parameter, seed, min_size))


def test_quantity_skew_has_the_distribution_asked_for():
    """Shares of a Dirichlet: variance (n-1) / (n^2 (n a + 1)). Logarithms of log-normal sizes: sigma."""
    count, sizes = 50, {}
    for concentration in (0.5, 5.0):
        shares = np.concatenate(
            [
                [
                    len(part) / 10**5
                    for part in quantity_dirichlet(10**5, count, concentration, seed)
                ]
                for seed in range(40)
            ]
        )
        expected = (count - 1) / (count**2 * (count * concentration + 1))
        np.testing.assert_allclose(shares.var(), expected, rtol=0.25)
    for sigma in (0.3, 1.0):
        parts = quantity_log_normal(3 * 10**5, 1000, sigma, 0)
        np.testing.assert_allclose(np.log([len(part) for part in parts]).std(), sigma, rtol=0.1)
        sizes[sigma] = [len(part) for part in parts]
    assert max(sizes[0.3]) < max(sizes[1.0])
    equal = [len(part) for part in quantity_log_normal(1003, 10, 0, 0)]
    assert max(equal) - min(equal) <= 1


def test_quantity_skew_leaves_labels_alike():
    labels = np.repeat(np.arange(10), 5000)
    parts = quantity_dirichlet(len(labels), 10, 0.5, 1)
    large = [part for part in parts if len(part) > 2000]
    shares = label_table(large, labels, 10) / [[len(part)] for part in large]
    assert len(large) > 2 and np.abs(shares - 0.1).max() < 0.03


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: pathological(np.arange(10), 2, 4, 0),
            r"labels_per_client must be an integer in 5\.\.10",
        ),
        (
            lambda: pathological(np.arange(10), 2, 11, 0),
            r"labels_per_client must be an integer in 5\.\.10",
        ),
        (lambda: pathological(np.zeros(10), 2, 1, 0), "labels must be a vector of integers"),
        (lambda: pathological([0, 1, 1, 1], 4, 1, 0), "labels_per_client=1 leaves 1 of 4 clients"),
        (lambda: quantity_dirichlet(10, 11, 1.0, 0), r"num_clients must be an integer in 1\.\.10"),
        (lambda: quantity_dirichlet(10, 2, 0, 0), "concentration must be a finite number above 0"),
        (
            lambda: quantity_dirichlet(10, 2, 1.0, 0, 6),
            r"min_size must be an integer in 1\.\.5, for 2 clients",
        ),
        (
            lambda: quantity_log_normal(10, 2, -1, 0),
            r"sigma must be at least 0 and at most 100, got -1",
        ),
        (
            lambda: quantity_log_normal(10, 2, float("nan"), 0),
            r"sigma must be finite",
        ),
        (lambda: quantity_log_normal(10, 2, 1, -1), "seed must be at least 0, got -1"),
    ],
)
def test_skewed_partitions_refuse_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["anna", "ben", "cleo"]), min_size=1), st.booleans())
def test_by_id_groups_rows(ids, as_integers):
    ids = np.array([len(name) for name in ids] if as_integers else ids)
    names, parts = by_id(ids)
    as_objects, same_parts = by_id(ids.astype(object))  # as pandas has them
    assert names.tolist() == as_objects.tolist()
    assert [part.tolist() for part in parts] == [part.tolist() for part in same_parts]
    assert_partition(parts, len(ids))
    for name, part in zip(names, parts, strict=True):
        assert set(ids[part].astype(str)) == {name}
        assert (np.diff(part) > 0).all()
    data = FederatedData.from_arrays({"id": ids}, partition=parts, client_ids=names)
    assert data.num_clients == len(set(ids.tolist()))


def test_other_seed_other_partition():
    labels = np.repeat(np.arange(10), 50)
    for make in (
        lambda seed: iid(500, 10, seed),
        lambda seed: dirichlet(labels, 10, 1.0, seed),
        lambda seed: shards(labels, 10, 2, seed),
        lambda seed: pachinko(labels, labels // 2, 10, 50, seed),
        lambda seed: list(capacity_pools(50, 0.3, seed).values()),
    ):
        assert differs(make(0), make(1))


def test_iid_rows_carry_no_order():
    """Chi-square of labels over clients, 81 degrees of freedom: mean 81, standard deviation 13."""
    labels = np.repeat(np.arange(10), 500)
    statistics = []
    for seed in range(20):
        table = label_table(iid(5000, 10, seed), labels, 10)
        statistics.append(((table - 50) ** 2 / 50).sum())
    # All 5,000 examples are dealt, so the mean over 20 seeds is 81 (as 5000/4999) with error 2.8.
    assert 70 < np.mean(statistics) < 92


def test_dirichlet_shares_have_the_distribution_asked_for():
    """Shares of a label over n clients: mean 1/n, variance (n-1) / (n^2 (n a + 1))."""
    labels = np.repeat(np.arange(200), 1000)
    num_clients = 5
    for concentration in (0.1, 1.0, 10.0):
        parts = dirichlet(labels, num_clients, concentration, seed=3)
        shares = label_table(parts, labels, 200) / 1000
        expected = (num_clients - 1) / (num_clients**2 * (num_clients * concentration + 1))
        np.testing.assert_allclose(shares.mean(axis=1), 1 / num_clients, atol=0.08)
        np.testing.assert_allclose(shares.var(), expected, rtol=0.2)


def test_dirichlet_limits():
    labels = np.repeat(np.arange(10), 400)
    uniform = label_table(dirichlet(labels, 8, 1e6, 0), labels, 10)
    assert np.abs(uniform - 50).max() <= 2
    skewed = label_table(dirichlet(labels, 8, 1e-5, 0), labels, 10)
    # Each label belongs to one client; empty clients were given an example of another client.
    assert ((skewed > 50).sum(axis=0) == 1).all()
    assert skewed.max(axis=0).sum() > 0.98 * len(labels)


@settings(max_examples=40)
@given(
    st.integers(1, 25), st.integers(1, 12), st.sampled_from([0.3, 1.0, 100.0]), st.integers(0, 99)
)
def test_equal_dirichlet_is_an_even_partition(num_clients, together, concentration, seed):
    labels = np.random.default_rng(seed).integers(0, 20, 40 * num_clients + seed)
    parts = equal_dirichlet(labels, num_clients, concentration, seed, together)
    assert len(parts) == num_clients
    assert_partition(parts, len(labels))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert_same(parts, equal_dirichlet(labels, num_clients, concentration, seed, together))


def test_equal_dirichlet_skews_labels_less_where_concentration_is_large():
    """As FedSDD uses it: CIFAR-10's 50,000 labels over 20 clients, 2,500 each."""
    labels = np.repeat(np.arange(10), 5000)
    largest = {}
    for concentration in (0.1, 1.0, 1000.0):
        parts = equal_dirichlet(labels, 20, concentration, 0)
        assert {len(part) for part in parts} == {2500}
        shares = label_table(parts, labels, 10) / 2500
        largest[concentration] = shares.max(1).mean()
    assert largest[0.1] > 0.5 > largest[1.0] > 0.2 > largest[1000.0]


def test_equal_dirichlet_gives_up_in_one_line():
    with pytest.raises(
        ValueError, match=r"concentration=0\.01 leaves a client with less than half"
    ):
        equal_dirichlet(np.zeros(40, int), 10, 0.01, 0)


def test_dirichlet_ends_where_redrawing_would_not():
    labels = np.zeros(1000, int)
    parts = dirichlet(labels, 500, 1e-3, seed=0, min_size=2)
    assert_partition(parts, 1000)
    assert {len(part) for part in parts} == {2}


def test_shards_give_each_client_few_labels():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
    parts = shards(labels, 50, 2, seed=0)
    counts = [len(np.unique(labels[part])) for part in parts]
    # 100 shards of 10 examples with one label each; a client's two shards share one with p = 9/99.
    assert max(counts) == 2 and 40 <= sum(count == 2 for count in counts) <= 50


def test_pachinko_on_cifar100_labels():
    parts = pachinko(CIFAR_FINE, CIFAR_COARSE, 500, 100, seed=0)
    assert_partition(parts, 50_000)
    assert {len(part) for part in parts} == {100}


def test_pachinko_distribution_of_labels():
    """Before labels run out, labels per client follow the two Dirichlet distributions."""
    tables, fine_tables = [], []
    for seed in range(40):  # the first clients of many trees: nothing is used up yet
        parts = pachinko(CIFAR_FINE, CIFAR_COARSE, 5, 100, seed)
        tables.append(label_table(parts, CIFAR_COARSE, 20))
        fine_tables.append(label_table(parts, CIFAR_FINE, 100))
    coarse, fine = np.concatenate(tables), np.concatenate(fine_tables)
    # A coarse share is Beta(0.1, 1.9), so a label is absent from 100 draws with probability
    # B(0.1, 101.9) / B(0.1, 1.9) = prod_{i<100} (1.9 + i) / (2 + i); 20 such labels.
    steps = np.arange(100)
    expected_labels = 20 * (1 - np.prod((1.9 + steps) / (2 + steps)))
    np.testing.assert_allclose((coarse > 0).sum(axis=1).mean(), expected_labels, rtol=0.08)
    np.testing.assert_allclose(coarse.mean(axis=0), 5, rtol=0.5)
    # A Dirichlet-multinomial count of 100 draws over 20 labels of concentration 0.1 each.
    expected_variance = 100 * 0.05 * 0.95 * (100 + 2) / (1 + 2)
    np.testing.assert_allclose(coarse.var(), expected_variance, rtol=0.15)
    # Within a coarse label of n draws, variance n (1/5) (4/5) (n + 50) / 51 for concentration 10.
    by_coarse = fine.reshape(len(fine), 20, 5)
    drawn = coarse[..., None]
    excess = (by_coarse - drawn / 5) ** 2
    expected = drawn * 0.16 * (drawn + 50) / 51
    np.testing.assert_allclose(excess.sum() / (5 * expected.sum()), 1, rtol=0.15)


def test_pachinko_renormalises_when_a_label_is_used_up():
    """Labels 0, 1, 2 are equally likely; when label 0 is used up, 1 and 2 still are."""
    fine = np.repeat([0, 1, 2], [10, 2000, 2000])
    for coarse in (np.zeros_like(fine), fine):  # the label is a leaf, or a whole branch
        (part,) = pachinko(fine, coarse, 1, 2010, 0, 1e6, 1e6)
        counts = np.bincount(fine[part])
        assert counts[0] == 10
        assert abs(counts[1] - 1000) < 4 * np.sqrt(2000) / 2


def test_rows_of_a_label_are_dealt_at_random():
    """The order of the data may matter, so each client's examples must spread over it."""
    labels = np.zeros(4000, int)
    for parts in (
        dirichlet(labels, 4, 1e3, seed=0),
        pachinko(labels, labels, 4, 1000, seed=0),
        shards(labels, 4, 1, seed=0),
    ):
        for part in parts:
            # The mean index of 1,000 of 4,000 examples has standard error 32.
            assert abs(part.mean() - 2000) < 150


def test_pachinko_concentrations_matter():
    wide = pachinko(CIFAR_FINE, CIFAR_COARSE, 20, 100, 0, root_concentration=1e5)
    narrow = pachinko(CIFAR_FINE, CIFAR_COARSE, 4, 100, 0, root_concentration=1e-4)
    assert np.mean([len(np.unique(CIFAR_COARSE[part])) for part in wide]) > 19
    assert np.mean([len(np.unique(CIFAR_COARSE[part])) for part in narrow]) < 1.5
    one_leaf = pachinko(CIFAR_FINE, CIFAR_COARSE, 2, 100, 0, 1e-4, 1e-4)
    assert np.mean([len(np.unique(CIFAR_FINE[part])) for part in one_leaf]) < 1.5


LABELS = np.repeat(np.arange(2), 5)
MASKED = np.ma.masked_array(LABELS, np.arange(10) == 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(3, 4, 0), r"num_clients must be an integer in 1\.\.3"),
        (lambda: iid(3, 0, 0), "num_clients"),
        (lambda: iid(3, 2.0, 0), "num_clients"),
        (lambda: iid(3, 2, -1), "seed must be at least 0, got -1"),
        (lambda: iid(3, 2, 0.5), "seed"),
        (lambda: dirichlet(LABELS, 2, 0.0, 0), "concentration must be a finite number above 0"),
        (lambda: dirichlet(LABELS, 2, float("nan"), 0), "concentration"),
        (lambda: dirichlet(LABELS, 2, float("inf"), 0), "concentration"),
        (lambda: dirichlet(LABELS, 2, "1", 0), "concentration"),
        (lambda: dirichlet(LABELS, 11, 1.0, 0), r"num_clients must be an integer in 1\.\.10"),
        (
            lambda: dirichlet(LABELS, 2, 1.0, 0, min_size=6),
            r"min_size must be an integer in 1\.\.5",
        ),
        (lambda: dirichlet(LABELS, 2, 1.0, 0, min_size=0), "min_size"),
        (lambda: dirichlet(LABELS * 1.0, 2, 1.0, 0), "labels must be a vector of integers"),
        (lambda: equal_dirichlet(LABELS, 2, 0.0, 0), "concentration must be a finite number"),
        (lambda: equal_dirichlet(LABELS, 11, 1.0, 0), r"num_clients must be an integer in 1"),
        (
            lambda: equal_dirichlet(LABELS, 2, 1.0, 0, 0),
            "together must be at least 1, got 0",
        ),
        (lambda: shards(LABELS, 3, 4, 0), r"shards_per_client must be an integer in 1\.\.3"),
        (
            lambda: pachinko(LABELS, LABELS, 2, 6, 0),
            r"examples_per_client must be an integer in 1\.\.5",
        ),
        (lambda: pachinko(LABELS, LABELS[:5], 2, 2, 0), "equal lengths, got 10 and 5"),
        (lambda: pachinko(LABELS, np.arange(10), 2, 2, 0), "fine label 0 is under"),
        (lambda: pachinko(LABELS, LABELS, 2, 2, 0, root_concentration=-1), "root_concentration"),
        (lambda: pachinko(LABELS, LABELS, 2, 2, 0, leaf_concentration=0), "leaf_concentration"),
        (lambda: iid("no", 2, 0), "num_examples must be an integer of at least 1, got 'no'"),
        (lambda: iid(5.0, 2, 0), "num_examples must be an integer of at least 1, got 5.0"),
        (lambda: iid(10**20, 2, 0), "num_examples must be at most 2,147,483,647"),
        (lambda: dirichlet(LABELS, 2, 10**400, 0), "concentration must be a finite number above 0"),
        (lambda: by_id([]), "ids"),
        (lambda: by_id(MASKED), "ids must not be masked.* the 1 masked entries"),
        (lambda: dirichlet(MASKED, 2, 1.0, 0), "labels must not be masked"),
        (lambda: pachinko(LABELS, MASKED, 2, 2, 0), "coarse_labels must not be masked"),
    ],
)
def test_clear_errors(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "form",
    [
        lambda labels: labels[:, None],
        lambda labels: np.eye(4)[labels],
        lambda labels: np.eye(4, dtype=bool)[labels],
    ],
)
def test_labels_in_other_plain_forms_are_dealt_alike(form):
    labels = np.arange(40) % 4
    expected = dirichlet(labels, 5, 1.0, seed=0)
    for own, other in zip(expected, dirichlet(form(labels), 5, 1.0, seed=0), strict=True):
        np.testing.assert_array_equal(own, other)
    with pytest.raises(ValueError, match="labels must be a vector of integers"):
        dirichlet(np.eye(4)[labels] / 2, 5, 1.0, seed=0)


def test_a_concentration_may_be_an_integer_that_numpy_has_no_room_for():
    parts = dirichlet(LABELS, 2, 10**20, seed=0)
    for expected, found in zip(dirichlet(LABELS, 2, 1e20, seed=0), parts, strict=True):
        np.testing.assert_array_equal(found, expected)
