r"""FedMD under user-level differential privacy, on scikit-learn's handwritten digits; no download.

A hundred parties have one image of each of the digits 6 to 9, and four architectures. Digits 0 to 5 are
public. A run is local_only, in which parties train alone, or fed_md and its epsilon at delta = 1e-5: 2,
8 or inf, which clips and adds no noise. All parties take part in every round, so no draw of a cohort
hides them. The noise on a public image's mean logits gets smaller with more parties, fewer images and
fewer rounds. Hence there are five rounds with 100 public images each, and a digest of ten epochs. The
digest and the clip are the best of three trials by held-out accuracy of one seed.

    fedcodist compare digits_private_parties
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults
from fedcodist.configs import digits_parties

EPSILONS = ("inf", "8", "2")


def get_runs() -> list[str]:
    """Training alone, then FedMD with every epsilon."""
    return ["local_only", *(f"fed_md,{epsilon}" for epsilon in EPSILONS)]


def get_config(run: str = "fed_md,8") -> ConfigDict:
    """Returns one run."""
    defaults.check_run(run, get_runs())
    method, *budget = run.split(",")
    config = digits_parties.get_config(method)
    config.name, config.run = "digits_private_parties", run
    config.rounds = config.full_rounds = 5
    config.data.update(num_parties=100, per_class=1)
    config.parties.networks = "digits_four"
    if budget:
        config.algorithm.update(alignment_size=100, digest_epochs=10)
        noise = dict(noise_multiplier=0.0) if budget == ["inf"] else dict(epsilon=float(budget[0]))
        with config.unlocked():
            config.algorithm.privacy = defaults.party_privacy(clip=10.0, delta=1e-5, **noise)
    config.phases.private.epochs = 300  # of one step each, as a party has four images
    config.phases.evaluate_every = 50
    config.evaluation.update(every=1, checkpoint_every=5)
    return config
