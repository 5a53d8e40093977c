r"""FedMD under user-level differential privacy: CIFAR-10 public, six classes of CIFAR-100 private.

A hundred parties have three images of each of the six classes, no image twice, and two architectures of
FedMD's table 1 with an eighth of the widths. A run is `local_only`, in which parties train alone, or
fed_md and its epsilon at delta = 1e-5: 2, 8 or inf, which clips and adds no noise. Clip, digest and
alignment set are those of `digits_private_parties`, where they were chosen. The rest is that of
`cifar_fed_md_small`, with half of the public images and epochs and 100 private epochs.

    python -m fedcodist.commands.compare --config experiments/configs/cifar100_private_parties.py \
        --workdir runs/cifar100_private_parties

The stop rule: every run once, three seeds. Training alone is FedMD without a digest, so that all runs
train equally long on private images.
"""

from ml_collections import ConfigDict

from experiments.configs import cifar_fed_md_small
from fedcodist.config import defaults
from fedcodist.configs import digits_private_parties

PARTIES = 100
WIDTHS = ((16, 32), (8, 16, 32))


def get_runs() -> list[str]:
    """Training alone, then FedMD with every epsilon."""
    return digits_private_parties.get_runs()


def get_config(run: str = "fed_md,8") -> ConfigDict:
    """Returns one run."""
    defaults.check_run(run, get_runs())
    _, *budget = run.split(",")
    config = cifar_fed_md_small.get_config("iid" if budget else "iid,alone")
    config.name, config.run = "cifar100_private_parties", run
    config.rounds = config.full_rounds = 5
    config.seeds = 3
    config.data.update(num_parties=PARTIES, num_public=1000)
    with config.ignore_type():
        config.parties.networks = tuple((WIDTHS[party % 2], 0.0) for party in range(PARTIES))
    config.parties.narrower = 1
    config.phases.centralised_bound = False
    config.phases.public.epochs = 4
    config.phases.private.epochs = 100  # of one step each
    if budget:
        config.algorithm.update(alignment_size=100, digest_epochs=10)
        noise = dict(noise_multiplier=0.0) if budget == ["inf"] else dict(epsilon=float(budget[0]))
        with config.unlocked():
            config.algorithm.privacy = defaults.party_privacy(clip=10.0, delta=1e-5, **noise)
    return config
