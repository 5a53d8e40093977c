"""FLOPs of a run, of its clients and of its server, from the networks and the settings.

The multiplications and additions of matrix products and direct convolutions are counted. Learning
from an example costs three forward passes: one, and one for each of the gradients of weights and of
activations. Element-wise operations, augmentation, averaging, evaluation and examples that fill a batch
are left out. So the number is the work that a method needs, whatever program does it. For parties with
their own networks, the rounds are counted, but not the training before them. FedKD's maps between hidden
states are left out too. A sentence of prepared text is counted without its padding, with the clients'
mean number of tokens over all pools. Prepared sentences and news are counted with their padding.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedcodist.config.registry import BASELINE, ENTRIES, load_methods
from fedcodist.report.work import Flops, Work

Config = Mapping[str, Any]


def flops_of_run(
    config: Config, examples: Mapping[str, float], distillation_steps: float | None = None
) -> Flops:
    """Counts a run.

    Args:
      config: as in config.json. Of a streamed run, `execution.stream` must be added: it is not there.
      examples: pool -> examples that its clients trained on, each as often as it was visited.
      distillation_steps: mean per round, where a method stops early; by default the config's.

    Raises:
      ValueError: a name in the config is unknown, or FLOPs are not known for the method.
    """
    of_server = _passes(config, config["algorithm"]["name"])
    of_clients = _passes(config, config["training"].get("method", BASELINE))
    work = Work(config, examples, config["rounds"], distillation_steps)
    clients = {pool: of_clients(work, pool) * count for pool, count in examples.items()}
    if config["algorithm"]["name"] == BASELINE:
        return Flops(clients, 0.0)
    flops = of_server(work)
    if not isinstance(flops, Flops):
        return Flops(clients, flops)
    # The server's method makes clients work too.
    clients = {pool: count + flops.clients[pool] for pool, count in clients.items()}
    return Flops(clients, flops.server)


def flops_of_parties(config: Config, examples: Mapping[str, float], rounds: int) -> Flops:
    """Counts a run of a method of parties or of clients on a graph, who are the "clients".

    Args:
      config: as in config.json, of a run that has finished.
      examples: party -> private examples that it trained on, each as often as it was visited.
      rounds: of the run.

    Raises:
      ValueError: as in `flops_of_run`.
    """
    count = _passes(config, config["algorithm"]["name"])
    return count(Work(config, examples, rounds))


def _passes(config: Config, name: str) -> Callable[..., Any]:
    load_methods(config)
    if name not in ENTRIES or (count := ENTRIES[name].passes) is None:
        raise ValueError(f"FLOPs of {name!r} are not counted: its Entry must have `passes`.")
    return count
