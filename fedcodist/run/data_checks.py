"""Checks of an experiment's data against its programs, before anything compiles.

Three kinds of values would train and evaluate without an error, but mean nothing: integers that need
more than 32 bits, floats that are not finite, and labels or tokens outside of the axis that they index.
The round and the evaluation are traced by shape to see what they do with each column. The columns that
matter are then read once.
"""

import weakref
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.inputs import Round
from fedcodist.core.method import FederatedAlgorithm, Predictor
from fedcodist.core.model import Batch
from fedcodist.core.tracing import strongly_typed, traced_once
from fedcodist.core.used_arguments import used_arguments
from fedcodist.data.column_values import check_32_bits, first_not_finite, least_and_largest
from fedcodist.run.client_splits import all_splits
from fedcodist.run.column_parts import Part
from fedcodist.run.column_uses import (
    UNKNOWN,
    Followed,
    Index,
    Uses,
    column_uses,
    of_column,
)
from fedcodist.run.evaluated_models import evaluated_models
from fedcodist.run.sources import ResidentData

PyTree = Any
_CLIENTS = ""  # the name of the clients' data, among names of data sets
_ROUNDS: Any = weakref.WeakKeyDictionary()  # an algorithm's round -> shapes -> Uses
_ROWS_AT_ONCE = 2**16


class _Table(NamedTuple):
    """Columns of one source.

    Attributes:
      where: the source's name in messages.
      columns: name -> array [examples, ...].
      starts: [clients], first example of each client; None without clients.
      client_ids: str [clients]; None without clients.
    """

    where: str
    columns: Mapping[str, Any]
    starts: Any = None
    client_ids: Any = None


def check_data(experiment: Any) -> None:
    """Checks an experiment's columns before anything compiles.

    Labels may be computed on before they index an axis. A constant shift is followed. Labels that are
    clipped, replaced where negative, or looked up in a table are not checked.

    Args:
      experiment: an Experiment whose `splits` and `final_splits` are FederatedData.

    Raises:
      ValueError: names the column, and the split or data set, which has

        - integers beyond 32 bits, in any column;
        - NaN or infinite values, if a program reads them without testing for them (as `jnp.isnan` and
          `jnp.nan_to_num` do);
        - integers outside of the axis that they index, such as a model's outputs or a table of tokens;
        - vectors that are not one-hot, if a program reads them as one-hot;
        - labels of candidates other than 1, 0 and -1, if `fedcodist.text.ranking` reads them.
    """
    data = experiment.data
    tables = {_CLIENTS: _Table("the clients' data", data.columns, data.starts, data.client_ids)}
    tables |= {
        name: _Table(f"data set {name!r}", columns) for name, columns in data.data_sets.items()
    }
    evaluated = {
        name: _Table(f"split {name!r}", split.columns, split.offsets[:-1], split.client_ids)
        for name, split in all_splits(experiment).items()
    }
    for table in (*tables.values(), *evaluated.values()):
        check_32_bits(table.where, table.columns)

    labels: set[str] = set()
    # Columns that the network, loss or metrics of a split read as classes.
    classes: set[str] = set()
    outputs: set[int] = set()
    for name, (predictor, variables) in evaluated_models(experiment.algorithm).items():
        outputs.add(predictor.model.num_classes)
        traced: dict[Any, tuple[Uses, Uses]] = {}
        for table in evaluated.values():
            key = _shapes(table.columns)
            if key not in traced:
                traced[key] = _evaluation_uses(experiment, predictor, variables, table.columns)
            network, measured = traced[key]
            labels |= {index.part.column for index in measured.indices}
            classes |= _columns_of_classes(network) | _columns_of_classes(measured)
            _check_uses(table, network, "")
            _check_uses(table, measured, f"model {name!r}", predictor.model.num_classes)
            _check_finite(table, network.read | measured.read, network.asked | measured.asked)

    uses = _round_uses(experiment.algorithm, data)
    for name, table in tables.items():
        of_table = _of_source(uses, name, labels)
        by_method = _columns_of_classes(of_table) - classes if evaluated else set()
        _check_uses(table, of_table, "the model", *outputs, by_method=by_method)
        _check_finite(table, of_table.read, of_table.asked)


def _of_source(uses: Uses, source: str, labels: set[str]) -> Uses:
    """The uses of one source's columns by their names.

    Comparisons with positions count for labels only, since one-hot inputs may be zero for padding.
    """
    parts = lambda parts: {
        part._replace(column=part.column[1]) for part in parts if part.column[0] == source
    }
    names = lambda columns: {column for name, column in columns if name == source}
    indices = {
        index._replace(part=part)
        for index in uses.indices
        for part in parts([index.part])
        if not index.is_compared or part.column in labels
    }
    return uses._replace(
        results=[],
        indices=indices,
        one_hot=parts(uses.one_hot),
        clicks=parts(uses.clicks),
        asked=names(uses.asked),
        read=names(uses.read),
    )


def _columns_of_classes(uses: Uses) -> set[str]:
    return {part.column for part in (*(index.part for index in uses.indices), *uses.one_hot)}


def _check_uses(
    table: _Table, uses: Uses, model: str, *outputs: int, by_method: Collection[str] = ()
) -> None:
    """Checks a table's columns.

    Args:
      table: the columns.
      uses: of its columns.
      model: what messages call the model with as many outputs as one of `outputs`.
      by_method: columns from which only the method itself reads classes.
    """
    for index in sorted(uses.indices, key=lambda index: (index.part, index.entries)):
        # A metric may compare labels with the first few classes only.
        if index.is_compared and index.entries not in outputs:
            continue
        _check_range(table, index, model if index.entries in outputs else "", by_method)
    for part in sorted(uses.one_hot):
        _check_one_hot(table, part, by_method)
    for part in sorted(uses.clicks):
        _check_clicks(table, part)


def _values(table: _Table, part: Part) -> np.ndarray:
    slices = (slice(start, stop) for start, stop in part.bounds)
    return np.asarray(table.columns[part.column])[(slice(None), *slices)]


def _place(table: _Table, part: Part, before: str) -> str:
    """The place of a part in messages, such as ' in [:, 0]'; empty for a whole column."""
    sizes = np.shape(table.columns[part.column])[1:]
    shown = [":"]
    for (start, stop), size in zip(part.bounds, sizes, strict=True):
        one = str(start) if stop - start == 1 else f"{start}:{stop}"
        shown.append(":" if (start, stop) == (0, size) else one)
    return f" {before} [{', '.join(shown)}]" if {*shown} != {":"} else ""


def _check_range(table: _Table, index: Index, model: str, by_method: Collection[str]) -> None:
    column = _values(table, index.part)
    if column.dtype.kind not in "biuf":
        return
    limits = least_and_largest(column)
    least, largest = -index.shift, index.entries - 1 - index.shift
    if limits is None or least <= limits[0] <= limits[1] <= largest:
        return
    entries = f"{index.entries} outputs of {model}" if model else f"{index.entries} entries"
    hint = (
        "the method itself reads it as the class of an example, so leave out examples without one"
        if index.part.column in by_method
        else "leave out examples without a label, or replace it with jnp.where in your loss and metrics"
    )
    raise ValueError(
        f"column {index.part.column!r} of {table.where} must have whole numbers from {least} to "
        f"{largest}, one for each of the {entries} that it chooses from, got {limits[0]} to "
        f"{limits[1]}{_place(table, index.part, 'in')}: {hint}; count from 0 or give more outputs."
    )


def _check_one_hot(table: _Table, part: Part, by_method: Collection[str]) -> None:
    column = _values(table, part)
    for start in range(0, len(column), _ROWS_AT_ONCE):
        vectors = column[start : start + _ROWS_AT_ONCE]
        is_one_hot = ((vectors == 0) | (vectors == 1)).all(-1) & (vectors.sum(-1) == 1)
        if not is_one_hot.all():
            place = np.unravel_index(int(np.argmin(is_one_hot)), is_one_hot.shape)
            hint = (
                "the method itself needs one class per example, also with a loss of your own"
                if part.column in by_method
                else "give a loss and metrics of your own for others"
            )
            raise ValueError(
                f"column {part.column!r} of {table.where} must have labels that are whole numbers "
                f"or one-hot vectors, a single 1 and else 0, got {vectors[place].tolist()!r:.60} in row "
                f"{start + int(place[0])}{_place(table, part, 'of')}: {hint}."
            )


def _check_clicks(table: _Table, part: Part) -> None:
    column = _values(table, part)
    for start in range(0, len(column), _ROWS_AT_ONCE):
        labels = column[start : start + _ROWS_AT_ONCE]
        is_known = np.isin(labels, (-1, 0, 1))
        if not is_known.all():
            place = np.unravel_index(int(np.argmin(is_known)), is_known.shape)
            raise ValueError(
                f"column {part.column!r} of {table.where} must have 1 for candidates that were "
                f"clicked, 0 for those that were not and -1 for padding, got {labels[place]} in row "
                f"{start + int(place[0])}{_place(table, part, 'of')}."
            )


def _check_finite(table: _Table, read: set[str], asked: set[str]) -> None:
    for name in sorted(read - asked):
        column = table.columns[name]
        dtype = np.dtype(column.dtype)
        if dtype.kind not in "fc":
            continue
        row_and_value = first_not_finite(column, jax.dtypes.canonicalize_dtype(dtype))
        if row_and_value is None:
            continue
        row, value = row_and_value
        who = ""
        if table.starts is not None:
            client = int(np.searchsorted(table.starts, row, side="right")) - 1
            who = f" (client {_client_name(client, table.client_ids)})"
        wide = f", beyond {jax.dtypes.canonicalize_dtype(dtype)}" if np.isfinite(value) else ""
        raise ValueError(
            f"column {name!r} of {table.where} must have finite numbers, got {value}{wide} in row "
            f"{row}{who}: leave such examples out, or replace the number."
        )


def _client_name(client: int, client_ids: Any) -> str:
    """A client's natural id in quotation marks, or its index if it has no other id."""
    name = str(client) if client_ids is None else str(client_ids[client])
    return name if name == str(client) else repr(name)


def _evaluation_uses(
    experiment: Any, predictor: Predictor, variables: PyTree, columns: Mapping[str, Any]
) -> tuple[Uses, Uses]:
    """The uses of a split's columns in evaluation: by the network, and by loss and metrics."""
    model = predictor.model

    def outputs_of(
        columns: dict[str, jax.Array], variables: PyTree
    ) -> tuple[dict[str, jax.Array], Any]:
        positions = jnp.arange(2)
        batch = experiment.evaluation_preprocess(columns, jax.random.key(0), positions)
        return dict(batch), predictor.predict(variables, batch)

    def measures_of(batch: Batch, outputs: Any) -> tuple[jax.Array, list[Any]]:
        return model.loss(outputs, batch), [
            statistic(outputs, batch) for statistic in model.metrics.values()
        ]

    two = {
        name: _struct((2, *np.shape(column)[1:]), column.dtype) for name, column in columns.items()
    }
    network, shapes = jax.make_jaxpr(outputs_of, return_shape=True)(two, variables)
    measures = jax.make_jaxpr(measures_of)(*shapes)
    # A batch has all columns. Only those that outputs depend on, or that measures read, matter.
    first = column_uses(
        network,
        _arguments({n: of_column(n, leaf.shape) for n, leaf in two.items()}, network),
        used_arguments(measures),
    )
    return first, column_uses(measures, first.results)


def _arguments(followed: PyTree, jaxpr: Any) -> list[Followed]:
    """What is known of a function's arguments, of which only the first are followed."""
    known = jax.tree.leaves(followed, is_leaf=lambda node: isinstance(node, Followed))
    return known + [UNKNOWN] * (len(jaxpr.jaxpr.invars) - len(known))


def _round_uses(algorithm: FederatedAlgorithm, data: Any) -> Uses:
    """The uses of all sources' columns in one round; a column is (source, name)."""
    struct = lambda array: _struct(np.shape(array), array.dtype)
    columns = {
        _CLIENTS: jax.tree.map(struct, dict(data.columns)),
        **{name: jax.tree.map(struct, dict(table)) for name, table in data.data_sets.items()},
    }
    known = _ROUNDS.setdefault(algorithm.round, {})
    key = tuple((name, _shapes(table)) for name, table in columns.items())
    if key not in known:
        known[key] = _traced_round(algorithm, columns, data.num_clients, data.capacity)
    return known[key]


def _traced_round(algorithm: FederatedAlgorithm, columns: Any, clients: int, capacity: int) -> Uses:
    number = jax.ShapeDtypeStruct((clients,), jnp.int32)
    of_cohort = lambda first, count: jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *jnp.shape(leaf)), jnp.result_type(leaf)), first
    )

    def one_round(
        columns: Mapping[str, Mapping[str, jax.Array]],
        starts: jax.Array,
        sizes: jax.Array,
        state: PyTree,
        client_states: PyTree,
        index: jax.Array,
        key: jax.Array,
        hyper: PyTree,
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        data_sets = {name: columns[name] for name in columns if name != _CLIENTS}
        source = ResidentData(columns[_CLIENTS], starts, sizes, data_sets, capacity)
        inputs = source.read(algorithm.select(index, key))
        return traced_once(algorithm.round)(state, client_states, Round(index, key, inputs), hyper)

    index, key = jax.ShapeDtypeStruct((), jnp.int32), keys.key_shape()
    selection = jax.eval_shape(algorithm.select, index, key)
    client_states = {
        pool: of_cohort(definition.first, selection.clients[pool].shape[0])
        for pool, definition in algorithm.client_states.items()
    }
    hyper = jax.tree.map(lambda leaf: _struct(np.shape(leaf), np.float64), algorithm.hyper)
    arguments = (
        columns,
        number,
        number,
        jax.eval_shape(lambda key: strongly_typed(algorithm.init(key)), key),
        client_states,
        index,
        key,
        hyper,
    )
    followed = {
        source: {name: of_column((source, name), leaf.shape) for name, leaf in table.items()}
        for source, table in columns.items()
    }
    jaxpr = jax.make_jaxpr(one_round)(*arguments)
    return column_uses(jaxpr, _arguments(followed, jaxpr))


def _shapes(columns: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        (name, np.shape(column)[1:], np.dtype(column.dtype).str)
        for name, column in sorted(columns.items())
    )


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array on the device, where int64 is int32."""
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))
