"""From a config's `training.compression` to compressed links, by the names that configs use."""

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

# What is lost for good elsewhere is kept for the next message where a compressor is biased by much.
COMPRESSORS: dict[str, Callable[[ConfigDict], Compressor | None]] = {
    "none": lambda settings: None,
    "svd": lambda settings: svd(settings.start, settings.end, _range_finder(settings)),
    "top_k": lambda settings: with_error_feedback(top_k(settings.share)),
    "quantisation": lambda settings: quantisation(settings.bits),
    "count_sketch": lambda settings: with_error_feedback(
        count_sketch(settings.rows, settings.columns, settings.count)
    ),
}


def _range_finder(settings: ConfigDict) -> RangeFinder | None:
    """`range_finder` is the number of its columns; SVD is exact where it is not set."""
    columns = settings.get("range_finder")
    return None if columns is None else RangeFinder(columns)


def with_links(config: ConfigDict, method: FederatedMethod) -> FederatedMethod:
    """The method with its links as `training.compression` says; as it is where that is not set.

    With `spectra`, metrics.jsonl tells of each layer of clients' updates the rank that SVD needs and the
    singular values; with `gradient_spectra` the same of a batch's gradient, before any optimizer.

    Raises:
      ValueError, TypeError: one line that names the setting.
    """
    settings = config.training.get("compression")
    if settings is None:
        return method
    makers = [
        choice(f"training.compression.{way}", settings[way], COMPRESSORS)
        for way in ("uplink", "downlink")
    ]
    with named("training.compression."):
        uplink, downlink = (make(settings) for make in makers)
    observe, observe_gradient = (
        spectra(settings.start, settings.end) if settings.get(of) else None
        for of in ("spectra", "gradient_spectra")
    )
    return compressed(method, config.rounds, uplink, downlink, observe, observe_gradient)
