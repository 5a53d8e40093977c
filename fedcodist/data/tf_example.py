"""Reads `tf.train.Example`, the record format of TensorFlow's data sets, without TensorFlow.

The message types are described to Google's protocol buffers, a package that Flax depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

# Message -> its fields (name, number, type). A type that protocol buffers lack is another message.
_MESSAGES = {
    "BytesList": [("value", 1, "bytes")],
    "FloatList": [("value", 1, "float")],
    "Int64List": [("value", 1, "int64")],
    "Feature": [
        ("bytes_list", 1, "BytesList"),
        ("float_list", 2, "FloatList"),
        ("int64_list", 3, "Int64List"),
    ],
    "Features": [("feature", 1, "Features.FeatureEntry")],
    "Example": [("features", 1, "Features")],
}
_DTYPES = {"float_list": np.float32, "int64_list": np.int64}


def decode_example(
    blob: bytes, names: Iterable[str] | None = None
) -> dict[str, list[bytes] | np.ndarray]:
    """Decodes a serialised `tf.train.Example`.

    Args:
      blob: the serialised message.
      names: features to decode, which is faster; all where not given. Missing ones are left out.

    Returns:
      feature -> list of bytes, or a vector of float32 or int64. A feature without values is an empty
        list.

    Raises:
      ValueError: the blob is malformed.
    """
    try:
        features = _example_class().FromString(blob).features.feature
    except DecodeError as error:
        raise ValueError(f"malformed tf.train.Example: {error}") from None
    result: dict[str, list[bytes] | np.ndarray] = {}
    for name in features if names is None else names:
        if name not in features:  # indexing would add it
            continue
        feature = features[name]
        kind = feature.WhichOneof("kind")
        values = getattr(feature, kind).value if kind else ()
        result[name] = np.array(values, _DTYPES[kind]) if kind in _DTYPES else list(values)
    return result


@functools.cache
def _example_class() -> Any:
    types = descriptor_pb2.FieldDescriptorProto
    # A separate pool avoids clashes with the descriptors of a loaded TensorFlow.
    file = descriptor_pb2.FileDescriptorProto(
        name="fedcodist/example.proto", package="fedcodist", syntax="proto3"
    )

    def add(owner: Any, name: str, number: int, kind: str, label: int, oneof: bool = False) -> None:
        field = owner.field.add(name=name, number=number, label=label)
        if kind.islower():
            field.type = getattr(types, f"TYPE_{kind.upper()}")
        else:
            field.type, field.type_name = types.TYPE_MESSAGE, f".fedcodist.{kind}"
        if oneof:
            field.oneof_index = 0

    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        is_choice = message == "Feature"
        if is_choice:
            described.oneof_decl.add(name="kind")
        if message == "Features":
            entry = described.nested_type.add(name="FeatureEntry")
            entry.options.map_entry = True
            add(entry, "key", 1, "string", types.LABEL_OPTIONAL)
            add(entry, "value", 2, "Feature", types.LABEL_OPTIONAL)
        is_single = message in ("Feature", "Example")
        label = types.LABEL_OPTIONAL if is_single else types.LABEL_REPEATED
        for name, number, kind in fields:
            add(described, name, number, kind, label, is_choice)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("fedcodist.Example"))
