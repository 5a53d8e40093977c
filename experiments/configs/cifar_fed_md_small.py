r"""FedMD with CIFAR-10 public and CIFAR-100 private at a size for a CPU; tests of the paper's remarks.

The ten networks have an eighth of the widths. There are 2,000 public images, with superclasses half of
the private images, and less training before the rounds. Most comments have the values of cifar_fed_md.py
or of the paper where they differ. Of the recorded runs, those with one change have three seeds.
Accuracies are far below the paper's, so only differences between runs, paired by seed, can be compared.
Seeds differ in initial weights, batches and alignment sets, but not in the division of the images.

    python -m fedcodist.commands.sweep --config experiments/configs/cifar_fed_md_small.py \
        --workdir runs/cifar_fed_md_small
    python -m fedcodist.report.tables_parties runs/cifar_fed_md_small/non_iid

A run is `non_iid` or `iid`. With `,alone` the same rounds have no digest, which separates the effect of
private training in the rounds from that of collaboration. The other runs are `non_iid` with one change:

- four of the ten parties are weak (two dense layers, four hidden units), with equal or low weights c_k;
- fewer epochs of the revisit, or a larger batch of the digest, against transient dips;
- other numbers of public images in a round. With all images a round has 40 steps of the digest, as many
  as `digest_epochs,10`; with 50 images it has one step, as `digest_batch_size,200`;
- probabilities in place of logits.

After 50 epochs of private training the weak parties still predict public classes only, so the others
learn from parties who know nothing of the private ones. With `private_epochs,500` at the end, weak
parties predict private classes before the first round, about as well as a guess; the run
`private_epochs,500` is the one to compare with. docs/results/fed_md.md has the results: collaboration
helps nearly every party, but 40 % (`non_iid`) and 80 % (`iid`) of the gain come from a party's own
training in the rounds.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.configs import cifar_fed_md
from fedcodist.config import defaults

# Table 1's widths.
WIDTHS = (
    *((128, 256), (128, 384), (128, 512), (256, 256), (256, 512)),
    *((64, 128, 256), (64, 128, 192), (128, 192, 256), (128, 128, 128), (128, 128, 192)),
)
WEAK = 4  # how many of the last parties
NARROWER = 8
HIDDEN = 4  # of a weak party
ALONE = {"algorithm.digest_epochs": 0}
LONG = {"phases.private.epochs": 500}
LOW = {"algorithm.weights": (10 - WEAK) * (1.0,) + WEAK * (0.1,)}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "weak,equal_weights": {},
    "weak,low_weights": LOW,
    "private_epochs,500": LONG,
    "weak,equal_weights,private_epochs,500": LONG,
    "weak,low_weights,private_epochs,500": {**LOW, **LONG},
    "revisit_epochs,2": {"algorithm.revisit_epochs": 2},
    "digest_batch_size,200": {"algorithm.digest_batch_size": 200},
    "digest_epochs,10": {"algorithm.digest_epochs": 10},
    "exchanged,probabilities": {"algorithm.exchanged": "probabilities"},
    "public_images,50": {"algorithm.alignment_size": 50},
    "public_images,all": {"algorithm.alignment_size": None},
    "non_iid,alone": ALONE,
    "iid,alone": ALONE,
}


def get_runs() -> list[str]:
    """Both experiments, and what is changed in them."""
    return ["non_iid", "iid", *CHANGES]


def get_config(run: str = "non_iid") -> ConfigDict:
    """Returns one run."""
    defaults.check_run(run, get_runs())
    is_iid = run.startswith("iid")
    config = cifar_fed_md.get_config("iid" if is_iid else "non_iid")
    config.name = "cifar_fed_md_small"
    config.run = run
    config.seeds = 5
    config.data.num_public = 2000  # paper: 50,000
    if not is_iid:
        config.rounds = config.full_rounds = 8  # 13
        config.data.per_class = 10  # 20
    config.parties.narrower = NARROWER
    weak = WEAK if run.startswith("weak") else 0
    shapes = (*WIDTHS[: 10 - weak], *weak * ((NARROWER * HIDDEN,),))
    with config.ignore_type():
        # Networks this narrow need no dropout.
        config.parties.networks = tuple((widths, 0.0) for widths in shapes)
    config.algorithm.alignment_size = 200  # paper: 5,000
    config.algorithm.digest_batch_size = 50  # 128 with superclasses, 256 without
    # Smaller batches: in so few steps of 128, running averages would stay close to their initial values.
    config.phases.public.update(epochs=8, batch_size=32)  # 20 and 128
    config.phases.stopping = "fixed"
    # Evaluated after the last epoch only: an epoch on so few private images is faster than an
    # evaluation.
    config.phases.evaluate_every = 50
    # With half as many images as many steps as in cifar_fed_md.py; these are few, see `,alone`.
    config.phases.private.epochs = 25 if is_iid else 50  # 25
    config.phases.centralised.epochs = 15  # 50
    # The bound does not depend on how parties collaborate.
    config.phases.centralised_bound = run in ("non_iid", "iid")
    with config.ignore_type():
        config.update_from_flattened_dict(dict(CHANGES.get(run, {})))
    config.execution.processes = 1
    return config
