"""Sources of a round's inputs: data on the device, or streamed from the host."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import flax.struct
import jax
import numpy as np

from fedcodist.core.checks import shown
from fedcodist.core.for_each_client import dealing_order
from fedcodist.core.inputs import Cohort, Examples, Inputs, Selection
from fedcodist.data.column_values import check_32_bits, give_back_pages
from fedcodist.data.columns import array_of, check_numbers
from fedcodist.data.federated_data import FederatedData


class ClientNames:
    """Natural ids of clients, str [clients].

    All instances are equal, since no program depends on them: JAX does not compile again for other ids.
    """

    def __init__(self, client_ids: np.ndarray):
        self.client_ids = client_ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientNames)

    def __hash__(self) -> int:
        return hash(ClientNames)


@flax.struct.dataclass
class ResidentData:
    """All data on the device, with columns as they are stored (uint8 images stay uint8).

    Attributes:
      columns: name -> [examples, ...], the clients' examples.
      starts: int32 [clients], first example of each client.
      sizes: int32 [clients], examples of each client.
      data_sets: data set -> columns of examples without clients.
      capacity: the largest size of any client.
      names: the clients' natural ids, for messages; None where unknown.
    """

    columns: Mapping[str, Any]
    starts: Any
    sizes: Any
    data_sets: Mapping[str, Mapping[str, Any]]
    capacity: int = flax.struct.field(pytree_node=False)
    names: ClientNames | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def client_ids(self) -> np.ndarray | None:
        """The clients' natural ids, str [clients]; None where unknown."""
        return None if self.names is None else self.names.client_ids

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.starts)

    def read(self, selection: Selection) -> Inputs:
        """The selected clients and examples, as a view without copies. Works inside jit."""
        cohorts = {
            pool: Cohort(
                self.columns, clients, self.starts[clients], self.sizes[clients], self.capacity
            )
            for pool, clients in selection.clients.items()
        }
        examples = {
            name: Examples(self.data_sets[name], indices)
            for name, indices in selection.examples.items()
        }
        return Inputs(cohorts, examples)

    def shapes(self, selection: Selection) -> Inputs:
        """The shapes of `read` for a selection of arrays or shapes."""
        return jax.eval_shape(ResidentData.read, self, selection)


def resident_data(
    federated: FederatedData,
    data_sets: Mapping[str, Mapping[str, Any] | FederatedData] | None = None,
) -> ResidentData:
    """Prepares federated data, and data sets without clients, to be moved to the device.

    Args:
      federated: the clients' examples.
      data_sets: data set -> columns, such as `{'unlabelled': {'image': images}}`, or FederatedData,
        of which the columns are used.

    Raises:
      ValueError, TypeError: names the data or column that is not allowed, such as one of integers that
        32 bits do not hold.
    """
    _check_addressable(federated)
    _check_columns("federated", federated.columns)
    return ResidentData(
        columns=dict(federated.columns),
        starts=federated.offsets[:-1].astype(np.int32),
        sizes=federated.client_sizes.astype(np.int32),
        data_sets=_data_sets(data_sets),
        capacity=int(federated.client_sizes.max()),
        names=ClientNames(federated.client_ids),
    )


class StreamedData:
    """Data that stays on the host, in memory or memory-mapped; each round's examples are gathered.

    A selection reads the same examples in the same order as from `ResidentData`. The next round's
    examples are gathered while the device works on the current round. Of memory-mapped columns, only the
    examples of these rounds are in memory.

    Args:
      federated: the clients' examples.
      data_sets: data set -> columns, as in `resident_data`.
    """

    def __init__(
        self,
        federated: FederatedData,
        data_sets: Mapping[str, Mapping[str, Any] | FederatedData] | None = None,
    ):
        _check_addressable(federated)
        _check_columns("federated", federated.columns)
        self._federated = federated
        self.data_sets = _data_sets(data_sets)
        self._largest_first = np.sort(federated.client_sizes)[::-1]
        self.num_clients = federated.num_clients
        self.columns, self.sizes = federated.columns, federated.client_sizes
        self.starts, self.client_ids = federated.offsets[:-1], federated.client_ids
        self.capacity = int(self._largest_first[0])

    @property
    def federated(self) -> FederatedData:
        """The clients' examples, on the host."""
        return self._federated

    def read(
        self, selection: Selection, devices: int = 1, local_devices: Sequence[int] = (0,)
    ) -> Inputs:
        """Gathers the selected examples into buffers whose shapes are the same in every round.

        Args:
          selection: the round's clients and examples.
          devices: how many devices share the clients, as in `for_each_client`.
          local_devices: the devices whose clients' examples are gathered. Columns of cohorts have one
            part of equal length per local device, and a client's start counts from the beginning of its
            device's part. Examples without clients are gathered whole, since every device may read them.
        """
        cohorts = {
            pool: self._cohort(np.asarray(clients), devices, local_devices)
            for pool, clients in selection.clients.items()
        }
        examples = {
            name: self._gather(name, np.asarray(indices))
            for name, indices in selection.examples.items()
        }
        for columns in (self._federated.columns, *self.data_sets.values()):
            give_back_pages(columns)
        return Inputs(cohorts, examples)

    def shapes(self, selection: Selection) -> Inputs:
        """The shapes of `read` on one device, for a selection of arrays or shapes."""

        def columns(source: Mapping[str, Any], length: int) -> dict[str, Any]:
            dtype = lambda column: jax.dtypes.canonicalize_dtype(column.dtype)
            return {
                name: jax.ShapeDtypeStruct((length, *column.shape[1:]), dtype(column))
                for name, column in source.items()
            }

        def cohort(clients: Any) -> Cohort:
            integers: Any = jax.ShapeDtypeStruct(clients.shape, np.int32)
            length = int(self._largest_first[: len(clients)].sum())
            return Cohort(
                columns(self.columns, length),
                clients=integers,
                starts=integers,
                sizes=integers,
                capacity=int(self._largest_first[0]),
            )

        def examples(name: str, indices: Any) -> Examples:
            places: Any = jax.ShapeDtypeStruct(indices.shape, np.int32)
            return Examples(columns(self.data_sets[name], indices.size), places)

        return Inputs(
            {pool: cohort(clients) for pool, clients in selection.clients.items()},
            {name: examples(name, indices) for name, indices in selection.examples.items()},
        )

    def ahead(self, read: Callable[[int], Inputs], rounds: Iterable[int]) -> Iterator[Inputs]:
        """Yields `read(round)` for every round, and computes it one round ahead of the consumer."""
        with ThreadPoolExecutor(max_workers=1) as executor:
            pending: Future[Inputs] | None = None
            for round in rounds:
                following = executor.submit(read, round)
                if pending is not None:
                    yield pending.result()
                pending = following
            if pending is not None:
                yield pending.result()

    def _cohort(self, clients: np.ndarray, devices: int, local_devices: Sequence[int]) -> Cohort:
        offsets = self._federated.offsets
        sizes = self._federated.client_sizes[clients]
        # Buffers fit the largest possible cohort, so that every round has the same shapes.
        largest = self._largest_first[: len(clients)]
        places = dealing_order(largest, devices)
        length = max(int(largest[places[device::devices]].sum()) for device in range(devices))
        order = dealing_order(sizes, devices)
        starts = np.zeros_like(sizes)
        for device in range(devices):
            dealt = sizes[order[device::devices]]
            starts[order[device::devices]] = np.cumsum(dealt) - dealt
        columns: dict[str, Any] = {}
        for name, column in self._federated.columns.items():
            buffer = np.zeros((len(local_devices) * length, *column.shape[1:]), column.dtype)
            for part, device in enumerate(local_devices):
                for place in order[device::devices]:
                    start, size = part * length + starts[place], sizes[place]
                    first = offsets[clients[place]]
                    buffer[start : start + size] = column[first : first + size]
            columns[name] = buffer
        integers: list[Any] = [part.astype(np.int32) for part in (clients, starts, sizes)]
        return Cohort(columns, integers[0], integers[1], integers[2], int(self._largest_first[0]))

    def _gather(self, name: str, indices: Any) -> Examples:
        flat_indices = indices.reshape(-1)
        is_used = bool((flat_indices >= 0).all())
        columns: dict[str, Any] = {
            column: np.asarray(values[flat_indices])
            if is_used
            else np.zeros((len(flat_indices), *values.shape[1:]), values.dtype)
            for column, values in self.data_sets[name].items()
        }
        positions: Any = np.arange(indices.size, dtype=np.int32).reshape(indices.shape)
        return Examples(columns, positions if is_used else indices)


def stack_inputs(inputs: list[Inputs]) -> Inputs:
    """Stacks the inputs of several seeds on a new leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *inputs)


def _data_sets(data_sets: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Columns of data sets without clients, checked; FederatedData is accepted too."""
    checked = {}
    if data_sets is not None and not isinstance(data_sets, Mapping):
        raise TypeError(
            f"data_sets must be columns by name of the data set, got {shown(data_sets)}."
        )
    for name, columns in (data_sets or {}).items():
        where = f"data_sets[{name!r}]"
        if isinstance(columns, FederatedData):
            columns = columns.columns
        if not isinstance(columns, Mapping):
            raise TypeError(
                f"{where} must be columns, a mapping from name to array, got a "
                f"{type(columns).__name__}."
            )
        checked[name] = {
            # JAX arrays stay on their device.
            column: values if isinstance(values, jax.Array) else array_of(column, values, where)
            for column, values in columns.items()
        }
        _check_columns(where, checked[name])
        sizes = {column: len(values) for column, values in checked[name].items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"{where} must have columns of equal numbers of examples, got {sizes}."
            )
    return checked


def _check_columns(where: str, columns: Mapping[str, Any]) -> None:
    check_numbers(where, columns)
    for name, column in columns.items():
        if column.ndim == 0:
            raise ValueError(f"{where} must have columns with rows, {name!r} is a scalar.")
    check_32_bits("the clients' data" if where == "federated" else where, columns)


def _check_addressable(federated: FederatedData) -> None:
    if not isinstance(federated, FederatedData):
        raise TypeError(
            f"federated must be FederatedData, the clients' examples, got {shown(federated)}."
        )
    if federated.num_examples >= 2**31:
        raise ValueError(
            f"federated data must have fewer than 2**31 examples, got {federated.num_examples}."
        )
    if (federated.client_sizes == 0).any():
        empty = str(federated.client_ids[int(np.argmin(federated.client_sizes))])
        raise ValueError(
            f"every client must have at least one example, client {empty!r} has none: leave such "
            "clients out with select(numpy.flatnonzero(data.client_sizes))."
        )
