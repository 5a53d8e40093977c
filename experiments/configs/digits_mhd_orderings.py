r"""The orderings of MHD's paper on scikit-learn's digits: 8 clients x 3 primary labels, no download.

Question: which of the paper's orderings do we find if training is about as many passes over the images
as the paper's (from settings of the paper that we could not verify), for which `cifar100_mhd.py` is too
short? A client makes 1,000 steps of 32 private and 64 public images, about 250 passes over the public
images. A new checkpoint is exchanged every 25 steps, so those in a buffer are older than in the paper:
8 x 25 of 1,000 steps on average, 20 % in place of 2.7 % (from the same settings). Runs are named as in
`cifar100_mhd.py`; only those that an ordering compares are here. Results are in docs/results/mhd.md.
Differences:

    graph,<graph>       the same eight clients, whose labels overlap; islands have two clients
    larger,<method>     4 clients x 5 labels, of which the first has the larger MLP
    levels,<which>      the same candidates, with a loss term of their own for those of the same level
    top,<n>             three heads, s = 100; teachers send the n largest probabilities of every head

Every run has five seeds, 0 to 4. Nothing was tuned here, and both weights are 1. Curves are of held-out
images; test images are used once, after the last round. One seed of `digits_mhd` (on a cycle) was seen
before, in a trial of a run's time.

The stop rule was fixed before the runs. Every run is made once, to its end, with five seeds, and
recorded. An ordering holds if the 95 % interval of its five differences within seeds (Student's t) is on
the paper's side of zero. It is refuted if the interval is on the other side, and otherwise undecided. No
seed is added after looking at results. A run takes one core half a minute to two minutes, all runs take
an hour. Runs that have not begun after this hour are put off, and the page says so.

Two further questions were asked after the first of the other runs and before their own runs, which are
four each and take five minutes. Which reading of SL + SF is the paper's? It is the one with which
"SL + SF less base" and "All less SL + SF" hold, if they do not hold with the other; otherwise the
question and the default stay open. How few predictions are enough? The fewest with which the last head's
shared accuracy is not below that with all predictions, by an interval that does not contain zero.

    python -m fedcodist.commands.sweep --config experiments/configs/digits_mhd_orderings.py \
        --workdir runs/digits_mhd
    python -m fedcodist.report.tables_heads runs/digits_mhd/*/
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_mhd
from experiments.configs.cifar100_mhd import BASELINES, CANDIDATES, GRAPHS, SKEWS
from fedcodist.config import defaults
from fedcodist.configs import digits_mhd

NOT_COMPARED = ("fed_avg_200", "periodic", "centralised")
# The weights of embeddings and heads; both are 1 in the other runs.
WEIGHTS = ((0, 0), (1, 0), (0, 1), (1, 3), (3, 1))
LEVELS = ("same_level", "same_level_and_self", "all", "all_plus")
TOP = (1, 2, 3, 10)  # 10 are all classes


def get_runs() -> list[str]:
    """The runs that orderings compare; those in the most orderings come first."""
    runs = [f"heads,s={s},{m}" for s in (100, 0) for m in (3, 1)] + ["heads,s=100,4"]
    runs += [f"local_only_steps,s={s}" for s in SKEWS]
    runs += [f"choice,random,s={s}" for s in SKEWS]
    runs += [f"teachers,{delta}" for delta in (2, 3, 4)]
    runs += [f"candidates,{name}" for name in CANDIDATES] + ["skip,one_head"]
    runs += [f"graph,{name}" for name in GRAPHS if name != "complete"]  # which heads,s=100,3 is
    longer = [name for name in BASELINES if name not in (*NOT_COMPARED, "local_only_steps")]
    runs += [f"{name},s={s}" for s in SKEWS for name in ("mhd_plus", *longer)]
    runs += [f"weights,s={s},{e},{a}" for s in SKEWS for e, a in WEIGHTS]
    runs += [f"public,{share}" for share in cifar100_mhd.PUBLIC_SHARES]
    runs += [f"larger,{method}" for method in cifar100_mhd.LARGER]
    return runs + [f"levels,{name}" for name in LEVELS] + [f"top,{count}" for count in TOP]


def get_config(run: str = "heads,s=100,3") -> ConfigDict:
    """Returns one experiment."""
    defaults.check_run(run, get_runs())
    kind, *values = run.split(",")
    skew = float(next((v.removeprefix("s=") for v in values if v.startswith("s=")), 100))
    values = [value for value in values if not value.startswith("s=")]
    method = BASELINES.get(kind, "multi_headed_distillation")
    if kind == "larger" and not values[0].startswith("mhd"):
        method = BASELINES[values[0].removesuffix("_small")]
    config = digits_mhd.get_config(method)
    config.name, config.run, config.seeds = "digits_mhd_orderings", run, 5
    config.data.skew = skew
    with config.unlocked():
        config.parties.graph = GRAPHS[values[0]] if kind == "graph" else dict(name="complete")
    if kind.endswith("_longer"):
        config.rounds = config.full_rounds = 2 * config.rounds
    if method == "multi_headed_distillation":
        config.algorithm.separate_levels = kind == "levels"  # both readings of SL + SF are run
    if kind == "levels":
        kind = "candidates"
    if kind == "top":
        config.algorithm.top_predictions = int(values[0])
    if method == "multi_headed_distillation" and kind not in ("graph", "larger"):
        cifar100_mhd.vary(config, kind, values)
    if kind == "larger":
        small_only = values[0] in ("mhd_small_only", "fed_avg_small")
        config.data.num_clients, config.data.labels_per_client = 4, 5
        with config.ignore_type():
            first = "digits_small" if small_only else "digits_large"
            config.parties.networks = (first, *3 * ("digits_small",))
        config.parties.projection = 32
    return config
