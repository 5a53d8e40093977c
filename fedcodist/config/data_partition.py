"""`data.partition`: the examples of a config's clients dealt anew, and features that differ among them.

`name` is a function of `fedcodist.data.partition`, and the other settings are its arguments, except for
its seed, which is `data.seed`:

    partition=dict(name="dirichlet", num_clients=100, concentration=0.3)
    partition=dict(name="pathological", num_clients=100, labels_per_client=2)
    partition=dict(name="quantity_log_normal", num_clients=100, sigma=1.0, feature_noise=0.1)

A user's function, "my_module:deal", may have the arguments `labels`, `num_examples`, `columns`,
`clients` and `seed`. Its other arguments are settings of the same names. It returns the indices of each
client's examples.

With `examples`, only that many examples, drawn at random, are dealt. With `all_splits`, the examples of
all splits of a prepared folder are dealt, and none is left for tests. "natural" keeps the clients,
"by_id" takes the clients that `column` names, and "merge_clients" deals whole clients. All splits
together have no clients that a partition could keep, so only "by_id" is possible then.

With every partition, `validation` sets a share of the examples apart before the others are dealt: the
last ones in the order of the data, so these must not be sorted by label, or random ones if the data have
several clients or splits, whose examples lie together. `feature_noise` is `sigma` of
`fedcodist.data.feature_skew.feature_noise`, and `feature_rotations` the `rotations` of
`feature_rotation`; both change the clients' images and no other split.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.bind import accepted, bind, offered
from fedcodist.config.config_errors import named
from fedcodist.config.references import choice_or_reference
from fedcodist.core.checks import check_number, shown
from fedcodist.data.client_pools import merge_clients
from fedcodist.data.feature_skew import feature_noise, feature_rotation
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import (
    by_id,
    dirichlet,
    equal_dirichlet,
    iid,
    pachinko,
    pathological,
    quantity_dirichlet,
    quantity_log_normal,
    shards,
    whole_labels,
)

# Indices of each client's examples, or client -> such indices, as `FederatedData.from_arrays` takes
# them.
Partition = list[np.ndarray] | dict[str, np.ndarray]


_OF_EVERY_PARTITION = frozenset(
    ("name", "examples", "all_splits", "validation", "feature_noise", "feature_rotations")
)


def repartitioned(
    clients: FederatedData, settings: ConfigDict, seed: int, largest_pixel: float | None
) -> dict[str, FederatedData]:
    """The split 'train' of clients who are dealt anew, and 'validation' where a share is set apart.

    Args:
      clients: whose examples are dealt.
      settings: a config's `data.partition`.
      seed: of the draws.
      largest_pixel: the value of an image that counts as 1, for noise; None: 255 for integers, and 1
        for floating numbers.

    Raises:
      ValueError, TypeError: one line that names the setting.
    """
    if "seed" in settings:
        raise ValueError(
            "data.partition.seed is no setting: a partition is drawn with data.seed. Set that instead."
        )
    deal = choice_or_reference("data.partition.name", settings.name, PARTITIONS)
    # Natural data without clients are often in the order of the ids by which they are then dealt.
    lie_together = (
        clients.num_clients > 1 or bool(settings.get("all_splits")) or settings.name == "by_id"
    )
    clients = _drawn(clients, settings.get("examples"), seed)
    clients, splits = _without_validation(
        clients, settings.get("validation") or 0.0, seed, at_random=lie_together
    )
    given = offered(deal, _OFFERS, clients, settings.name)
    if settings.get("all_splits") and "clients" in given:
        raise ValueError(
            f"data.partition.all_splits must be False with data.partition.name={settings.name!r}, which "
            "reads the clients of the data: the examples of all splits together have no clients."
        )
    _check_arguments(settings, accepted(deal, given) - {"seed", *given})
    partition = bind(deal, settings, "data.partition.", seed=seed, **given)
    if not isinstance(partition, Sequence | Mapping):
        raise ValueError(
            f"data.partition.name {settings.name!r} must return a list with the indices of each "
            f"client's examples, or a mapping, got {shown(partition)}."
        )
    with named("data.partition: "):
        train = FederatedData.from_arrays(
            _numbers(clients), partition=partition, allow_empty=clients.allow_empty
        )
    if rotations := settings.get("feature_rotations"):
        images = train.columns.get("image")
        if images is None or images.ndim < 3:
            shape = "none" if images is None else list(images.shape[1:])
            raise ValueError(
                "data.partition.feature_rotations needs a column 'image' [examples, height, width], "
                f"got examples of shape {shape}."
            )
        with named("data.partition.feature_"):
            train = feature_rotation(train, rotations, seed)
    if sigma := settings.get("feature_noise"):
        with named("data.partition.feature_noise: "):
            train = feature_noise(train, sigma, seed, scale=largest_pixel)
    return {"train": train, **splits}


def _numbers(data: FederatedData) -> dict[str, np.ndarray]:
    """The columns that are no text."""
    return {name: column for name, column in data.columns.items() if column.dtype.kind not in "SU"}


def check_no_all_splits(settings: ConfigDict) -> None:
    """Raises ValueError if `data.partition.all_splits` is set, for data that are not prepared."""
    if (settings.get("partition") or {}).get("all_splits"):
        raise ValueError(
            f"data.partition.all_splits must be of data.name='prepared', got {settings.name!r}."
        )


def check_no_validation(settings: ConfigDict, splits: Collection[str]) -> None:
    """Raises ValueError if `data.partition.validation` sets apart a split that the data have already."""
    if settings.partition.get("validation") and "validation" in splits:
        raise ValueError(
            "data.partition.validation must be None, the data have a split 'validation' already."
        )


def _check_arguments(settings: ConfigDict, arguments: set[str]) -> None:
    """Raises ValueError for a setting that only other partitions read, which `bind` would ignore."""
    for name in settings:
        if name not in arguments | _OF_EVERY_PARTITION:
            raise ValueError(
                f"data.partition.{name} is not a setting of {settings.name}, which has "
                f"{', '.join(sorted(arguments)) or 'none'}."
            )


def merged(splits: Mapping[str, FederatedData]) -> FederatedData:
    """The examples of all splits as one client's, with the columns of 'train'.

    Raises:
      ValueError: one line, if a split lacks one of these columns, or has other ones of its name.
    """
    of_train = splits["train"].columns
    names = list(of_train)
    for split, data in splits.items():
        if missing := [name for name in names if name not in data.columns]:
            raise ValueError(
                f"data.partition.all_splits needs {missing[0]!r} in every split, and {split!r} has "
                f"only {list(data.columns)}. Prepare the folder without {split!r}."
            )
        for name in names:
            if not _can_be_joined(data.columns[name], of_train[name]):
                raise ValueError(
                    f"data.partition.all_splits needs {name!r} of one kind in every split, and "
                    f"{split!r} has {_kind(data.columns[name])}, 'train' {_kind(of_train[name])}. "
                    f"Prepare the folder without {split!r}."
                )
    columns = {
        name: np.concatenate([data.columns[name] for data in splits.values()]) for name in names
    }
    return FederatedData.of_one_client(columns, "all")


def _can_be_joined(column: np.ndarray, other: np.ndarray) -> bool:
    """Whether they are one column without a change of values: integers may differ in width."""
    dtypes = (column.dtype, other.dtype)
    kinds = {dtype.kind for dtype in dtypes}
    are_integers = kinds == {"i", "u"} and np.result_type(*dtypes).kind == "i"
    return column.shape[1:] == other.shape[1:] and (len(kinds) == 1 or are_integers)


def _kind(column: np.ndarray) -> str:
    return f"{column.dtype} {list(column.shape[1:])}"


def _drawn(clients: FederatedData, count: int | None, seed: int) -> FederatedData:
    """The clients with `count` of all examples, drawn at random, which keep their order."""
    if count is None:
        return clients
    if count > clients.num_examples:
        raise ValueError(
            f"data.partition.examples must be at most the {clients.num_examples} that there are, "
            f"got {count}."
        )
    draw = np.random.default_rng([seed, count])
    return _with_examples(clients, np.sort(draw.choice(clients.num_examples, count, replace=False)))


def _with_examples(clients: FederatedData, kept: np.ndarray) -> FederatedData:
    """The clients with the examples of these ascending indices; who loses all examples is left out."""
    columns = {name: column[kept] for name, column in clients.columns.items()}
    offsets = np.searchsorted(kept, clients.offsets)
    remaining = (np.diff(offsets) > 0) | (clients.client_sizes == 0)
    ends = [0, *offsets[1:][remaining]]
    return FederatedData(
        columns, np.array(ends), clients.client_ids[remaining], clients.allow_empty
    )


def _without_validation(
    clients: FederatedData, share: float, seed: int, at_random: bool
) -> tuple[FederatedData, dict[str, FederatedData]]:
    """(the clients without a share of all examples; these examples as a split).

    They are the last ones of data without clients. Of several clients or splits, and with `by_id`, they
    are drawn at random, since the last clients may lack many labels. Both parts keep the order of the
    data. Text is left out of the split: it says whose examples they are, and networks do not read it.
    """
    check_number("data.partition.validation", share, low=0, high=1)
    count = round(share * clients.num_examples)
    if count == clients.num_examples:
        raise ValueError(
            f"data.partition.validation must leave clients some examples, got {share}."
        )
    if not share:
        return clients, {}
    if not count:
        raise ValueError(
            f"data.partition.validation must set some of the {clients.num_examples} examples apart, got "
            f"{share}."
        )
    is_apart = np.zeros(clients.num_examples, bool)
    if not at_random:
        _check_mixed(whole_labels(clients.columns.get("label", [])), count)
        is_apart[clients.num_examples - count :] = True
    else:
        # With the purpose's name it is another draw than those of the partition with this seed.
        draw = np.random.default_rng([seed, *b"validation"])
        is_apart[draw.choice(clients.num_examples, count, replace=False)] = True
    columns = {name: column[is_apart] for name, column in _numbers(clients).items()}
    validation = FederatedData.of_one_client(columns, "validation")
    return _with_examples(clients, np.flatnonzero(~is_apart)), {"validation": validation}


def _check_mixed(labels: np.ndarray, count: int) -> None:
    """Raises ValueError where the last `count` examples lack labels, by the order of the data."""
    if labels.ndim != 1 or not len(labels):
        return
    sorted_by_label = np.all(labels[1:] >= labels[:-1]) or np.all(labels[1:] <= labels[:-1])
    if sorted_by_label and labels[0] != labels[-1]:
        raise ValueError(
            "data.partition.validation takes the last examples, which have only the last labels, "
            "since the data are sorted by label: shuffle them first."
        )
    values, index = np.unique(labels, return_inverse=True)
    expected = np.bincount(index[:-count], minlength=len(values)) * count / (len(labels) - count)
    found = np.bincount(index[-count:], minlength=len(values))
    # Of shuffled examples a label of which n are expected is missing with a probability of about e^-n,
    # so there is a wrong alarm in one of 20,000 data sets, whatever the number of labels.
    least = 10 + np.log(len(values))
    if missing := np.flatnonzero((found == 0) & (expected >= least)).tolist():
        raise ValueError(
            f"data.partition.validation takes the last {count} examples, which have none of label "
            f"{values[missing[0]]}, of which about {expected[missing[0]]:.0f} would be among as many "
            "random ones: shuffle the data first."
        )


def _natural(clients: FederatedData) -> dict[str, np.ndarray]:
    parts = np.split(np.arange(clients.num_examples), clients.offsets[1:-1])
    return dict(zip(clients.client_ids.tolist(), parts, strict=True))


def _by_id(columns: Mapping[str, np.ndarray], column: str) -> dict[str, np.ndarray]:
    if column not in columns:
        raise ValueError(f"column must be one of {sorted(columns)}, got {column!r}")
    with named(f"column {column!r}: "):
        ids, parts = by_id(columns[column])
    return dict(zip(ids.tolist(), parts, strict=True))


def _merge_clients(clients: FederatedData, num_clients: int, seed: int) -> list[np.ndarray]:
    positions = {"position": np.arange(clients.num_examples)}
    numbered = FederatedData(positions, clients.offsets, clients.client_ids, clients.allow_empty)
    return [
        client["position"] for _, client in merge_clients(numbered, num_clients, seed).clients()
    ]


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "equal_dirichlet": equal_dirichlet,
    "pachinko": pachinko,
    "shards": shards,
    "pathological": pathological,
    "quantity_dirichlet": quantity_dirichlet,
    "quantity_log_normal": quantity_log_normal,
    "natural": _natural,
    "by_id": _by_id,
    "merge_clients": _merge_clients,
}


def _labels(clients: FederatedData, column: str, partition: str) -> np.ndarray:
    if column not in clients.columns:
        raise ValueError(
            f"data.partition.name: {partition!r} needs a column {column!r}, the data have "
            f"{sorted(clients.columns)}"
        )
    return clients.columns[column]


# Arguments of partitions that are not settings.
_OFFERS: dict[str, Callable[[FederatedData, str], Any]] = {
    "labels": lambda clients, name: _labels(clients, "label", name),
    "fine_labels": lambda clients, name: _labels(clients, "label", name),
    "coarse_labels": lambda clients, name: _labels(clients, "coarse_label", name),
    "num_examples": lambda clients, name: clients.num_examples,
    "columns": lambda clients, name: clients.columns,
    "clients": lambda clients, name: clients,
}
