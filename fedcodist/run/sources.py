"""Where a round's inputs come from: data held on the device, or streamed from the host."""

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
from fedcodist.data.federated_data import FederatedData, array_of, check_numbers


class ClientNames:
    """Natural ids beside data. No program depends on them, so that all of them are equal: JAX compiles
    nothing again for others."""

    def __init__(self, client_ids: np.ndarray):
        self.client_ids = client_ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientNames)

    def __hash__(self) -> int:
        return hash(ClientNames)


@flax.struct.dataclass
class ResidentData:
    """All data on the device, columns as they are stored (uint8 images stay uint8).

    Attributes:
      columns: name -> [rows, ...], the clients' examples.
      starts: int32 [clients], first row of each client.
      sizes: int32 [clients], examples of each client.
      data_sets: data set -> columns of examples without clients.
      capacity: the largest size of any client.
      names: the clients' natural ids, for messages; None where they are not known.
    """

    columns: Mapping[str, Any]
    starts: Any
    sizes: Any
    data_sets: Mapping[str, Mapping[str, Any]]
    capacity: int = flax.struct.field(pytree_node=False)
    names: ClientNames | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def client_ids(self) -> np.ndarray | None:
        """The clients' natural ids, str [clients]; None where they are not known."""
        return None if self.names is None else self.names.client_ids

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.starts)

    def read(self, selection: Selection) -> Inputs:
        """A view of what was selected; nothing is copied. Works inside jit."""
        cohorts = {
            pool: Cohort(
                self.columns, clients, self.starts[clients], self.sizes[clients], self.capacity
            )
            for pool, clients in selection.clients.items()
        }
        examples = {
            name: Examples(self.data_sets[name], places)
            for name, places in selection.examples.items()
        }
        return Inputs(cohorts, examples)

    def shapes(self, selection: Selection) -> Inputs:
        """What `read` gives for a selection, arrays or shapes, by shape."""
        return jax.eval_shape(ResidentData.read, self, selection)


def resident_data(
    federated: FederatedData,
    data_sets: Mapping[str, Mapping[str, Any] | FederatedData] | None = None,
) -> ResidentData:
    """Prepares federated data, and data sets without clients, to be moved to the device.

    Args:
      federated: the clients' examples.
      data_sets: data set -> columns, such as `{'unlabelled': {'image': images}}`, or FederatedData,
        whose columns are taken.

    Raises:
      ValueError, TypeError: one line; columns that are no numbers, or that 32 bits do not hold.
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
    """Data that stays on the host, in memory or memory-mapped; each round's rows are gathered.

    The same selections read the same examples in the same order as from `ResidentData`. The next
    round's rows are gathered while the device works on the present one. Of memory-mapped columns no
    more than a round's rows are resident.
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

    def read(self, selection: Selection, devices: int = 1, own: Sequence[int] = (0,)) -> Inputs:
        """Gathers what was selected into buffers whose shapes are the same in every round.

        Args:
          selection: the round's clients and examples.
          devices: how many devices the clients are dealt to, as `for_each_client` does.
          own: the devices whose clients' examples are gathered. Columns of cohorts hold one part of
            equal length per own device, and a client's start counts from the beginning of its
            device's part. Those without clients are gathered whole: every device may read any.
        """
        cohorts = {
            pool: self._cohort(np.asarray(clients), devices, own)
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
        """What `read` gives one device for a selection, arrays or shapes, by shape."""

        def columns(of: Mapping[str, Any], rows: int) -> dict[str, Any]:
            dtype = lambda column: jax.dtypes.canonicalize_dtype(column.dtype)
            return {n: jax.ShapeDtypeStruct((rows, *c.shape[1:]), dtype(c)) for n, c in of.items()}

        def cohort(clients: Any) -> Cohort:
            where: Any = jax.ShapeDtypeStruct(clients.shape, np.int32)
            room = int(self._largest_first[: len(clients)].sum())
            return Cohort(
                columns(self.columns, room), where, where, where, int(self._largest_first[0])
            )

        def examples(name: str, indices: Any) -> Examples:
            places: Any = jax.ShapeDtypeStruct(indices.shape, np.int32)
            return Examples(columns(self.data_sets[name], indices.size), places)

        return Inputs(
            {pool: cohort(clients) for pool, clients in selection.clients.items()},
            {name: examples(name, indices) for name, indices in selection.examples.items()},
        )

    def ahead(self, read: Callable[[int], Inputs], rounds: Iterable[int]) -> Iterator[Inputs]:
        """Calls `read` for each round, one round ahead of the consumer."""
        with ThreadPoolExecutor(max_workers=1) as executor:
            pending: Future[Inputs] | None = None
            for round in rounds:
                following = executor.submit(read, round)
                if pending is not None:
                    yield pending.result()
                pending = following
            if pending is not None:
                yield pending.result()

    def _cohort(self, clients: np.ndarray, devices: int, own: Sequence[int]) -> Cohort:
        offsets = self._federated.offsets
        sizes = self._federated.client_sizes[clients]
        # Room for the largest cohort possible, so that every round has one shape.
        largest = self._largest_first[: len(clients)]
        at = dealing_order(largest, devices)
        room = max(int(largest[at[device::devices]].sum()) for device in range(devices))
        order = dealing_order(sizes, devices)
        starts = np.zeros_like(sizes)
        for device in range(devices):
            dealt = sizes[order[device::devices]]
            starts[order[device::devices]] = np.cumsum(dealt) - dealt
        columns: dict[str, Any] = {}
        for name, column in self._federated.columns.items():
            buffer = np.zeros((len(own) * room, *column.shape[1:]), column.dtype)
            for part, device in enumerate(own):
                for place in order[device::devices]:
                    start, size = part * room + starts[place], sizes[place]
                    first = offsets[clients[place]]
                    buffer[start : start + size] = column[first : first + size]
            columns[name] = buffer
        where: list[Any] = [part.astype(np.int32) for part in (clients, starts, sizes)]
        return Cohort(columns, where[0], where[1], where[2], int(self._largest_first[0]))

    def _gather(self, name: str, indices: Any) -> Examples:
        wanted = indices.reshape(-1)
        is_used = bool((wanted >= 0).all())
        columns: dict[str, Any] = {
            column: np.asarray(values[wanted])
            if is_used
            else np.zeros((len(wanted), *values.shape[1:]), values.dtype)
            for column, values in self.data_sets[name].items()
        }
        positions: Any = np.arange(indices.size, dtype=np.int32).reshape(indices.shape)
        return Examples(columns, positions if is_used else indices)


def stack_inputs(inputs: list[Inputs]) -> Inputs:
    """Stacks the inputs of several seeds on a new leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *inputs)


def _data_sets(given: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Checked columns of data sets without clients; those of federated data are accepted."""
    found = {}
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"data_sets must be columns by name of the data set, got {shown(given)}.")
    for name, columns in (given or {}).items():
        where = f"data_sets[{name!r}]"
        if isinstance(columns, FederatedData):
            columns = columns.columns
        if not isinstance(columns, Mapping):
            raise TypeError(
                f"{where} must be columns, a mapping from name to array, got a "
                f"{type(columns).__name__}."
            )
        found[name] = {
            # Arrays of JAX stay where they are.
            column: values if isinstance(values, jax.Array) else array_of(column, values, where)
            for column, values in columns.items()
        }
        _check_columns(where, found[name])
        sizes = {column: len(values) for column, values in found[name].items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"{where} must have columns of equal numbers of rows, got {sizes}.")
    return found


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
        raise ValueError(f"every client must have at least one example, client {empty!r} has none.")
