"""What a round reads: cohorts as views of flat columns, and examples of other data sets."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax


@flax.struct.dataclass
class ClientData:
    """One client's examples: start to start + size of flat columns.

    Attributes:
      columns: name -> array [examples, ...], shared by all clients and never copied per client.
      start: int32 scalar, the client's first example.
      size: int32 scalar, its number of examples; 0 for a slot that only fills a chunk.
      bound: int32 scalar, the largest size among the clients handled together with this one.
      capacity: the largest size of any client of the data.
      ragged: whether bound may exceed size, so that some steps must change nothing.
    """

    columns: Mapping[str, jax.Array]
    start: jax.Array
    size: jax.Array
    bound: jax.Array
    capacity: int = flax.struct.field(pytree_node=False)
    ragged: bool = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Cohort:
    """The clients invited to one round of one pool.

    Attributes:
      columns: name -> array [examples, ...]: the whole data set on the device, or a buffer with the
        cohort's examples when data is streamed from the host.
      clients: int32 [cohort], global client indices; random keys follow these.
      starts: int32 [cohort], first example of each client in `columns`.
      sizes: int32 [cohort], examples of each client.
      capacity: the largest size of any client of the data.
      present: bool [cohort], who takes part; the others have no examples and no weight. None: all do.
    """

    columns: Mapping[str, jax.Array]
    clients: jax.Array
    starts: jax.Array
    sizes: jax.Array
    capacity: int = flax.struct.field(pytree_node=False)
    present: jax.Array | None = None


@flax.struct.dataclass
class Examples:
    """Examples without clients, such as the server's unlabelled data.

    Attributes:
      columns: name -> array [examples, ...].
      indices: int32 [steps, batch], the examples of each step's batch; -1 everywhere in a round that
        does not use them.
    """

    columns: Mapping[str, jax.Array]
    indices: jax.Array


@flax.struct.dataclass
class Selection:
    """What a round uses, as small integer arrays.

    Attributes:
      clients: pool -> int32 [cohort], client indices.
      examples: data set -> int32 [steps, batch], indices of examples.
    """

    clients: Mapping[str, jax.Array]
    examples: Mapping[str, jax.Array]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a round reads: a cohort per pool and examples per data set.

    Cohorts of one data set on the device share one `columns` object. It stays a single object within
    JAX's transformations, so that a round can see that it is shared.
    """

    cohorts: Mapping[str, Cohort]
    examples: Mapping[str, Examples]

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[tuple[str, int], ...]]:
        """Every `columns` object once, the rest of the cohorts, and the examples."""
        columns: list[Any] = []
        places: dict[str, int] = {}
        place_of: dict[int, int] = {}  # an object's identity -> its place
        for pool in sorted(self.cohorts):
            of_pool = self.cohorts[pool].columns
            places[pool] = place_of.setdefault(id(of_pool), len(columns))
            if places[pool] == len(columns):
                columns.append(of_pool)
        rest = {
            pool: dataclasses.replace(cohort, columns={}) for pool, cohort in self.cohorts.items()
        }
        parts = {"columns": columns, "cohorts": rest, "examples": self.examples}
        children = [(jax.tree_util.GetAttrKey(name), part) for name, part in parts.items()]
        return children, tuple(places.items())

    @classmethod
    def tree_unflatten(cls, places: tuple[tuple[str, int], ...], parts: Any) -> "Inputs":
        """The inverse of `tree_flatten_with_keys`."""
        columns, rest, examples = parts
        cohorts = {
            pool: dataclasses.replace(rest[pool], columns=columns[place]) for pool, place in places
        }
        return cls(cohorts, examples)


@flax.struct.dataclass
class Round:
    """A round, as an algorithm gets it.

    Attributes:
      index: int32 scalar, from 0.
      key: the run's root key. Every draw derives its key from this one by its purpose and `index`.
      inputs: the cohorts' data, and examples of other data sets.
      axis_name: the mesh axis over which devices share the work; None on one device.
    """

    index: Any
    key: jax.Array
    inputs: Inputs
    axis_name: str | None = flax.struct.field(pytree_node=False, default=None)
