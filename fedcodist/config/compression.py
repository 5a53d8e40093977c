"""Compresses links as a config's `training.compression`, or `algorithm.compression` of parties, says."""

from collections.abc import Callable

from ml_collections import ConfigDict

from fedcodist.compression.compressed import compressed
from fedcodist.compression.compressor import Compressor
from fedcodist.compression.count_sketch import count_sketch
from fedcodist.compression.error_feedback import with_error_feedback
from fedcodist.compression.quantisation import quantisation
from fedcodist.compression.spectra import spectra
from fedcodist.compression.svd import RangeFinder, svd
from fedcodist.compression.top_k import top_k
from fedcodist.config.config_errors import choice, named
from fedcodist.core.method import FederatedMethod

# Top-k has error feedback: what one message loses is added to the next. A count-sketch has none: where
# no entries stand out, its largest estimates are collisions, and the error would grow.
COMPRESSORS: dict[str, Callable[[ConfigDict], Compressor | None]] = {
    "none": lambda settings: None,
    "svd": lambda settings: svd(settings.start, settings.end, _range_finder(settings)),
    "top_k": lambda settings: with_error_feedback(top_k(settings.share)),
    "quantisation": lambda settings: quantisation(settings.bits),
    "count_sketch": lambda settings: count_sketch(settings.rows, settings.columns, settings.count),
}


def _range_finder(settings: ConfigDict) -> RangeFinder | None:
    """A range finder with `range_finder` columns; where this is not set, None, and SVD is exact."""
    columns = settings.get("range_finder")
    return None if columns is None else RangeFinder(columns)


def with_links(config: ConfigDict, method: FederatedMethod) -> FederatedMethod:
    """Returns the method with compressed links, or as it is if `training.compression` is not set.

    With `spectra`, metrics.jsonl has the singular values of each layer of the clients' updates, and the
    rank that SVD needs for it. With `gradient_spectra` it has the same of a batch's gradient, before any
    optimizer.

    Raises:
      ValueError, TypeError: names the setting.
    """
    settings = config.training.get("compression")
    if settings is None:
        return method
    uplink, downlink = links_of(settings, "training.compression")
    observe, observe_gradient = (
        spectra(settings.start, settings.end) if settings.get(setting) else None
        for setting in ("spectra", "gradient_spectra")
    )
    return compressed(method, config.rounds, uplink, downlink, observe, observe_gradient)


def links_of(settings: ConfigDict, path: str) -> tuple[Compressor | None, Compressor | None]:
    """The compressors of uplink and downlink.

    Args:
      settings: `compression`.
      path: the settings' path, for messages.

    Raises:
      ValueError, TypeError: names the setting.
    """
    columns = settings.get("range_finder")
    if columns is not None and "svd" not in map(settings.get, ("uplink", "downlink")):
        raise ValueError(
            f"{path}.range_finder must not be set unless uplink or downlink is 'svd', got {columns}."
        )
    makers = [
        choice(f"{path}.{link}", settings[link], COMPRESSORS) for link in ("uplink", "downlink")
    ]
    with named(f"{path}."):
        uplink, downlink = (make(settings) for make in makers)
    return uplink, downlink
