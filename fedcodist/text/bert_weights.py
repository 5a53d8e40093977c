"""Reads and writes an encoder's parameters as a safetensors file with the names of `transformers`."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from fedcodist.core.checks import check_integer
from fedcodist.core.tensor_files import load_tensors, save_tensors
from fedcodist.text.bert import TABLES, Encoder

PyTree = Any
PREFIX = "bert."
VOCABULARY = "vocabulary_sha256"
"""Name of `vocabulary_checksum` in a file's metadata."""

# Tensors of heads for BERT's pre-training and other tasks, which an encoder does not have.
_OTHERS = ("pooler.", "cls.", "classifier.", "qa_outputs.", "embeddings.position_ids")
# Names of a normalisation's parameters in other releases -> names here.
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

_EMBEDDINGS = {
    "words": "word_embeddings",
    "positions": "position_embeddings",
    "types": "token_type_embeddings",
    "norm": "LayerNorm",
}
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "output": "output.dense",
    "norm": "output.LayerNorm",
}


def save_encoder(
    path: str | os.PathLike[str], params: PyTree, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes an encoder's parameters, kernels as [outputs, inputs].

    Args:
      path: the file.
      params: of an `Encoder`.
      metadata: strings kept in the file's header.
    """
    tensors = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = tuple(key.key for key in keys)
        # A transposed view would be written in its order in memory.
        tensors[PREFIX + _bert_name(names)] = np.asarray(_turned(names, leaf), order="C")
    save_tensors(path, tensors, {"format": "pt", **(metadata or {})})


def vocabulary_checksum(pieces: Iterable[str]) -> str:
    """The sha256 of a vocabulary's `vocab.txt`: the pieces in their order, one a line."""
    return hashlib.sha256("".join(f"{piece}\n" for piece in pieces).encode()).hexdigest()


def check_vocabulary(path: str | os.PathLike[str], pieces: Iterable[str]) -> None:
    """Refuses an encoder of another vocabulary, whose shapes may be the same.

    A file that does not say of which vocabulary it is passes, such as one of released weights.

    Args:
      path: a safetensors file.
      pieces: the word pieces of the data, by number.

    Raises:
      ValueError: no safetensors file, or one of an encoder of another vocabulary.
    """
    file = os.fspath(path)
    noted = _header(file)[0].get(VOCABULARY)
    if noted not in (None, vocabulary_checksum(pieces)):
        raise ValueError(
            f"{file} must be of an encoder of the data's vocabulary, got one of other word pieces or of "
            "another order; pre-train one on the same prepared folder."
        )


def load_encoder(path: str | os.PathLike[str], encoder: Encoder) -> PyTree:
    """Reads an encoder's parameters, as nested dictionaries of float32 NumPy arrays.

    Names may begin with 'bert.' or not; heads for pre-training and other tasks are left out.

    Args:
      path: a safetensors file.
      encoder: the file must have its sizes. A student is made from the result by `first_layers`.

    Raises:
      ValueError: no safetensors file, or a tensor that is missing, unknown, of another shape, or not of
        finite floats.
    """
    file = os.fspath(path)
    tensors = _tensors(file)
    params = _read(file, tensors, _shapes(encoder))
    if tensors:
        raise ValueError(f"{file} has tensor {min(tensors)}, which the encoder has not.")
    return params


def load_embeddings(path: str | os.PathLike[str]) -> PyTree:
    """Reads the tables and the normalisation of an encoder's embeddings, whatever its layers.

    Returns:
      Parameters of `Embeddings`, as nested dictionaries of float32 NumPy arrays.

    Raises:
      ValueError: as `load_encoder`.
    """
    file = os.fspath(path)
    tensors = _tensors(file)
    words, positions, types = _table_shapes(file, {n: list(t.shape) for n, t in tensors.items()})
    encoder = Encoder(words[0], words[1], layers=1, heads=1, positions=positions[0], types=types[0])
    return _read(file, tensors, {"embeddings": _shapes(encoder)["embeddings"]})["embeddings"]


def _tensors(file: str) -> dict[str, np.ndarray]:
    """The file's tensors of the encoder, by their plain names."""
    try:
        stored = load_tensors(file)
    except ValueError as error:
        raise ValueError(f"cannot read an encoder from {file}: {error}.") from error
    tensors = {_plain(name): tensor for name, tensor in stored.items()}
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_OTHERS)}


def _shapes(encoder: Encoder) -> PyTree:
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.eval_shape(encoder.init, jax.random.key(0), tokens)["params"]


def _read(file: str, tensors: dict[str, np.ndarray], shapes: PyTree) -> PyTree:
    """Takes the tensors of these parameters out of `tensors`."""

    def read(keys: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        names = tuple(key.key for key in keys)
        name = _bert_name(names)
        if name not in tensors:
            raise ValueError(f"{file} has no tensor {name}, which the encoder needs.")
        tensor = tensors.pop(name)
        expected = tuple(_turned(names, leaf).shape)
        if tensor.shape != expected:
            raise ValueError(
                f"{file}: tensor {name} must be {list(expected)}, got {list(tensor.shape)}."
            )
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(f"{file}: tensor {name} must be of floats, got {tensor.dtype}.")
        numbers = np.asarray(_turned(names, tensor), np.float32, order="C")
        if not np.isfinite(numbers).all():
            raise ValueError(f"{file}: tensor {name} must be finite.")
        return numbers

    return jax.tree_util.tree_map_with_path(read, shapes)


def _table_shapes(file: str, shapes: Mapping[str, list[int]]) -> list[list[int]]:
    """The shapes of the embedding tables, in the order of TABLES."""
    tables = [f"embeddings.{_EMBEDDINGS[table]}.weight" for table in TABLES]
    for name in tables:
        if len(shapes.get(name, ())) != 2:
            raise ValueError(f"{file} has no table {name}, which every encoder needs.")
    return [shapes[name] for name in tables]


def stored_encoder(path: str | os.PathLike[str], heads: int) -> Encoder:
    """The encoder in a file; only the shapes of its tensors are read.

    Args:
      path: a safetensors file.
      heads: attention heads of each layer, which no shape shows. A number in the file must agree.

    Raises:
      ValueError: no safetensors file, no tensors with BERT's names, or a number of heads that does not
        fit.
    """
    file = os.fspath(path)
    check_integer("heads", heads, low=1)
    metadata, shapes = _header(file)
    words, positions, types = _table_shapes(file, shapes)
    if (noted := metadata.get("heads", str(heads))) != str(heads):
        raise ValueError(f"{file} is of an encoder of {noted} heads, got one of {heads}.")
    of_layers = {name.split(".")[2] for name in shapes if name.startswith("encoder.layer.")}
    width = words[1]
    of_heads = _rows(shapes, "query", otherwise=width)
    inner = _rows(shapes, "inner", otherwise=4 * width)
    if of_heads % heads:
        raise ValueError(f"{file}: heads must divide its attention's {of_heads} rows, got {heads}.")
    return Encoder(
        words[0],
        width,
        len(of_layers),
        heads,
        positions[0],
        types[0],
        head_width=None if of_heads == width else of_heads // heads,
        inner_width=None if inner == 4 * width else inner,
    )


def _header(file: str) -> tuple[dict[str, str], dict[str, list[int]]]:
    """The metadata and the shapes of the tensors in a file, by their plain names."""
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            shapes = {_plain(name): opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
            return opened.metadata() or {}, shapes
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"cannot read an encoder from {file}: {error}.") from error


def _rows(shapes: Mapping[str, list[int]], module: str, otherwise: int) -> int:
    """Outputs of a module of the first layer in a file; `otherwise` where the file does not have it."""
    shape = shapes.get(_bert_name(("layer0", module, "kernel")), [])
    return shape[0] if shape else otherwise


def _bert_name(names: tuple[str, ...]) -> str:
    """('layer3', 'query', 'kernel') -> 'encoder.layer.3.attention.self.query.weight'."""
    part, module, *rest = names
    kind = "bias" if rest == ["bias"] else "weight"
    if part == "embeddings":
        return f"embeddings.{_EMBEDDINGS[module]}.{kind}"
    return f"encoder.layer.{part.removeprefix('layer')}.{_LAYER[module]}.{kind}"


def _plain(name: str) -> str:
    name = name.removeprefix(PREFIX)
    for old, new in _OLD.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _turned(names: tuple[str, ...], array: Any) -> Any:
    """Dense kernels are [inputs, outputs] here and [outputs, inputs] in BERT's files."""
    if names[-1] != "kernel":
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape[::-1], array.dtype)
    return array.T
