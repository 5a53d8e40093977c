"""Natural ids of clients as arrays of text."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedcodist.core.checks import check_not_masked, check_several
from fedcodist.data.columns import check_fixed_width, one_array


def default_client_ids(num_clients: int) -> np.ndarray:
    """The ids of clients that have no natural ones: their indices, str `[num_clients]`."""
    return np.arange(num_clients).astype(str)


def client_id_array(client_ids: Iterable[str] | np.ndarray, name: str = "client_ids") -> np.ndarray:
    """Natural ids as an array of text. Raises TypeError or ValueError for anything else.

    `name` is the argument's, for messages.
    """
    check_not_masked(name, client_ids)
    if isinstance(client_ids, np.ndarray) and client_ids.dtype.kind == "U":
        return np.asarray(client_ids)
    check_several(name, client_ids)
    ids = [_as_text(name, client_id) for client_id in client_ids]
    array = np.array(ids, dtype=np.str_)
    check_fixed_width(name, array, ids)
    return array


def natural_ids_as_text(name: str, ids: Any) -> np.ndarray:
    """Natural ids, also in bytes or objects as in pandas, as an array of text; numbers as they are.

    The same text in bytes is the same id. Objects that are all integers are indices. `name` is the
    argument's, for messages.
    """
    if isinstance(ids, list | tuple):
        is_text = [isinstance(owner, str | bytes) for owner in ids]
        if any(is_text) and not all(is_text):
            # NumPy would make text of the others, such as 'nan'.
            other = ids[is_text.index(False)]
            raise ValueError(f"{name} must be all text where some are, got {other!r:.40}")
        if any(is_text):
            return client_id_array(ids, name)
    owners = one_array(name, ids)
    if owners.dtype.kind not in "OS" or owners.ndim != 1:
        return owners
    if owners.dtype.kind == "O":
        is_whole = lambda owner: isinstance(owner, int | np.integer) and not isinstance(owner, bool)
        if len(owners) and all(map(is_whole, owners)):
            try:
                return owners.astype(np.int64)
            except OverflowError:
                raise ValueError(f"{name} must be integers that 64 bits hold") from None
    return client_id_array(owners.tolist(), name)


def ids_of_keys(partition: Mapping[Any, Any], name: str = "partition's keys") -> list[str]:
    """The keys of {client: examples}, text or integers, as natural ids in the order given.

    `name` is what messages call them.
    """
    ids = [
        str(int(key))
        if isinstance(key, int | np.integer) and not isinstance(key, bool)
        else _as_text(name, key)
        for key in partition
    ]
    if len(set(ids)) < len(ids):
        repeated = next(client_id for client_id in ids if ids.count(client_id) > 1)
        raise ValueError(f"{name} must be different clients, got {repeated!r} twice")
    return ids


def checked_client_ids(client_ids: Any, num_clients: int) -> np.ndarray:
    """A read-only copy of the clients' ids. Raises ValueError unless each client has one of its own."""
    array = client_id_array(client_ids).copy()
    if array.shape != (num_clients,):
        raise ValueError(
            f"client_ids must name each of the {num_clients} clients once, "
            f"got shape {list(array.shape)}"
        )
    values, counts = np.unique(array, return_counts=True)
    if len(values) < num_clients:
        raise ValueError(f"client_ids must be unique, got {str(values[counts > 1][0])!r} twice")
    if num_clients and not values[0]:
        raise ValueError("client_ids must not contain an empty string")
    array.setflags(write=False)
    return array


def _as_text(name: str, client_id: Any) -> str:
    """A natural id as text. TFDS and HDF5 store ids as bytes."""
    if isinstance(client_id, bytes):
        try:
            return client_id.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{name} must be text in UTF-8, got {client_id!r:.60}") from None
    if not isinstance(client_id, str):
        raise TypeError(f"{name} must be strings, got {client_id!r:.60}")
    return str(client_id)
