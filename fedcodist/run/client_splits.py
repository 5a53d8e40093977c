"""Splits with every client's own test examples, and their checks."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedcodist.core.checks import check_names, shown
from fedcodist.core.method import FederatedAlgorithm, all_client_models
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.client_metrics import CLIENTS, NOT_METRICS


class ClientSplit(NamedTuple):
    """Every client's own examples, on which the models that it would use are measured.

    Attributes:
      test: the examples. Clients are those of the experiment's data, in their order; clients without
        examples are not measured. `train_test_within_clients` makes such data.
      train: examples of the same clients as `test`, if these take no part in the run's training. Models
        are personalised on them before they are measured. None where `test` has the experiment's own
        clients.
    """

    test: FederatedData
    train: FederatedData | None = None


def checked_client_splits(argument: str, client_splits: Any) -> dict[str, ClientSplit]:
    """The splits by name; FederatedData becomes a ClientSplit of the experiment's own clients.

    Raises:
      ValueError, TypeError: names the split that is not allowed.
    """
    if not isinstance(client_splits, Mapping):
        raise TypeError(
            f"{argument} must be ClientSplits or FederatedData by name, got {shown(client_splits)}."
        )
    check_names(argument, client_splits)
    checked = {}
    for name, split in client_splits.items():
        where = f"{argument}[{name!r}]"
        if isinstance(split, FederatedData):
            split = ClientSplit(split)
        if not isinstance(split, ClientSplit):
            raise TypeError(f"{where} must be a ClientSplit or FederatedData, got {shown(split)}.")
        for part, data in split._asdict().items():
            if not isinstance(data, FederatedData) and (part == "test" or data is not None):
                raise TypeError(f"{where}.{part} must be FederatedData, got {shown(data)}.")
        checked[name] = split
    return checked


def check_client_splits(experiment: Any) -> None:
    """Raises ValueError that names the client split which does not fit the experiment's clients."""
    algorithm: FederatedAlgorithm = experiment.algorithm
    taken = {*experiment.splits, *experiment.final_splits}
    for where, name, split in _with_place(experiment):
        if name in taken:
            raise ValueError(f"{where} must have a name that no other split has.")
        taken.add(name)
        if not all_client_models(algorithm):
            raise ValueError(
                f"{where} must not be given for {algorithm.name}, whose clients use no model."
            )
        expected, whose = experiment.data.num_clients, "the experiment's data"
        if split.train is not None:
            expected, whose = split.train.num_clients, f"{where}.train"
            _check_unseen(where, split.train, algorithm)
        if split.test.num_clients != expected:
            raise ValueError(
                f"{where}.test must have the {expected} clients of {whose}, it has "
                f"{split.test.num_clients}."
            )
        ids = (experiment.data if split.train is None else split.train).client_ids
        if ids is not None and len(other := np.flatnonzero(ids != split.test.client_ids)):
            place = int(other[0])
            raise ValueError(
                f"{where}.test must have the clients of {whose} in the same order: client {place} is "
                f"{str(ids[place])!r} there and {str(split.test.client_ids[place])!r} here."
            )
        for group, models in all_client_models(algorithm).items():
            for metric in {
                name for one in models.predictors.values() for name in one.model.metrics
            }:
                if "/" in metric or metric in NOT_METRICS:
                    raise ValueError(
                        f"metrics of {group!r} must not be named {metric!r} with {where}: names have no "
                        f"'/', and {list(NOT_METRICS)} are other columns of {CLIENTS}."
                    )
            if not len(measured_clients(split, algorithm, group)):
                raise ValueError(f"{where}.test must have an example of a client of {group!r}.")


def measured_clients(split: ClientSplit, algorithm: FederatedAlgorithm, group: str) -> np.ndarray:
    """The clients of a pool or an architecture who have examples in a split, int32 ascending.

    Unseen clients use every pool's model.
    """
    sizes = split.test.client_sizes
    if split.train is not None:
        return np.flatnonzero(sizes).astype(np.int32)
    clients = np.asarray(all_client_models(algorithm)[group].clients)
    return clients[sizes[clients] > 0].astype(np.int32)


def all_splits(experiment: Any) -> dict[str, FederatedData]:
    """All examples on which an experiment's models are evaluated, or personalised before, by name."""
    client_splits = {**experiment.client_splits, **experiment.final_client_splits}
    tests = {name: split.test for name, split in client_splits.items()}
    unseen = {
        f"{name}, training examples": split.train
        for name, split in client_splits.items()
        if split.train is not None
    }
    return {**experiment.splits, **experiment.final_splits, **tests, **unseen}


def _with_place(experiment: Any) -> Iterator[tuple[str, str, ClientSplit]]:
    """(field of the experiment, name, split) of every client split."""
    for argument in ("client_splits", "final_client_splits"):
        for name, split in getattr(experiment, argument).items():
            yield f"{argument}[{name!r}]", name, split


def _check_unseen(where: str, train: FederatedData, algorithm: FederatedAlgorithm) -> None:
    if any(models.client_states is not None for models in all_client_models(algorithm).values()):
        raise ValueError(
            f"{where}.train must not be given for {algorithm.name} (data.unseen_clients must be None in "
            "a config): a client who takes no part has no model."
        )
    if (train.client_sizes == 0).any():
        empty = str(train.client_ids[int(np.argmin(train.client_sizes))])
        raise ValueError(
            f"{where}.train must have an example of every client, client {empty!r} has none."
        )
