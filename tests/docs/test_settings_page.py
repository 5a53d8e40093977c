"""docs/settings.md has every setting once, with the limits and the names that the code allows."""

import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from fedcodist.algorithms.clients.fed_kd_exchange import EXCHANGES
from fedcodist.algorithms.clients.per_fed_avg import BATCHES
from fedcodist.algorithms.graph import mhd_exchange, mhd_losses
from fedcodist.algorithms.parties import fed_gh, fed_l2g, fed_proto, fed_tgp, nearest_prototype
from fedcodist.algorithms.pools import client_ensembles, fed_be
from fedcodist.config.allowed_settings import ALLOWED
from fedcodist.config.compression import COMPRESSORS
from fedcodist.config.data_graph import ASSIGNMENTS
from fedcodist.config.data_partition import PARTITIONS
from fedcodist.config.data_settings import READ
from fedcodist.config.graph_methods import GRAPHS
from fedcodist.config.loggers import CALLBACKS, LOGGERS
from fedcodist.config.metrics import METRICS
from fedcodist.config.phases import STOPPING
from fedcodist.config.schedules import SCHEDULES
from fedcodist.distillation.divergences import DIVERGENCES

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
# Setting as the page writes it -> the names that the code allows.
NAMES = {
    "metrics.<name>": METRICS,
    "loggers": LOGGERS,
    "callbacks.<name>.name": CALLBACKS,
    "schedules.<name>.name": SCHEDULES,
    "data.name": READ,
    "data.assignment": ASSIGNMENTS,
    "data.partition.name": PARTITIONS,
    "training.per_fed_avg.variant": BATCHES,
    "training.fed_kd.exchange": EXCHANGES,
    "<group>.compression.uplink": COMPRESSORS,
    "parties.graph.name": [*GRAPHS, "time_varying"],
    "algorithm.divergence": [*DIVERGENCES, "kl", "mse"],
    "algorithm.sampling": fed_be.SAMPLINGS,
    "algorithm.measured": client_ensembles.CLIENT_ENSEMBLES,
    "algorithm.weighting": fed_proto.WEIGHTINGS,
    "algorithm.predict_by": [*nearest_prototype.PREDICT_BY, *fed_gh.PREDICT_BY],
    "algorithm.margin": fed_tgp.MARGINS,
    "algorithm.guided": fed_l2g.GUIDED,
    "algorithm.candidates": mhd_losses.CANDIDATES,
    "algorithm.choice": mhd_losses.CHOICES,
    "algorithm.embedding_distance": mhd_losses.EMBEDDING_DISTANCES,
    "algorithm.checkpoints_on": mhd_exchange.PLACES,
    "phases.stopping": STOPPING,
}


def rows():
    """Setting as the page writes it -> its cell of values."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            names, values, *_ = line.strip("| ").split(" | ")
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", names), values)
    return found


def settings_of(written):
    """The settings that a name on the page stands for; `<name>` stands for any."""
    parts = re.sub(r"<\w+>", "*", written).split(".")
    if ".".join(parts) in ALLOWED:
        return [".".join(parts)]
    same_length = [path for path in ALLOWED if path.count(".") == len(parts) - 1]
    return [path for path in same_length if all(map(fnmatchcase, path.split("."), parts))]


def test_every_setting_is_there_once():
    count = Counter(path for written in rows() for path in settings_of(written))
    assert count == dict.fromkeys(ALLOWED, 1)


@pytest.mark.parametrize("written", sorted(rows()))
def test_the_limits_are_those_of_the_check(written):
    path = settings_of(written)[0]
    with pytest.raises((TypeError, ValueError)) as error:
        ALLOWED[path](path, object())
    allowed = str(error.value).partition(" must be ")[2].partition(", got")[0]
    kind = re.match(r"an integer of at least|a number|True or False", allowed)
    if kind is None:
        return  # of names, of which NAMES has some
    words = {"an integer of at least": "integer, at least", "a number": "number,"}
    words["True or False"] = "`True`, `False`"
    expected = allowed.replace(kind.group(), words[kind.group()], 1)
    expected = expected.replace("at most 1 and above 0", "above 0 and at most 1")
    narrower = {"training.secure_sum.bits": "integer, 3 to 32", "training.scaffold_option": "1, 2"}
    assert rows()[written] == narrower.get(written, expected)


@pytest.mark.parametrize("written", NAMES)
def test_the_names_are_those_of_the_code(written):
    assert set(re.findall(r"`(\w+)`", rows()[written])) == set(NAMES[written])
