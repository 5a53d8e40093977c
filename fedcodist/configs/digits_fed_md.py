r"""FedMD on scikit-learn's handwritten digits: six parties of three architectures; no download.

Digits 0 to 5 are public. Digits 6 to 9 are the private classes; each party has three images of each.
Comments have the released code's settings for CIFAR where they differ.

    fedcodist run digits_fed_md
    python -m fedcodist.report.tables_parties runs/digits_fed_md

The second command prints each party's accuracy before and after the collaboration, and its upper bound.
docs/results/fed_md.md has results on CIFAR.
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults


def get_config() -> ConfigDict:
    """Returns the experiment."""
    config = defaults.experiment("digits_fed_md", 20)

    config.data = dict(
        name="digits_public_private",
        num_parties=6,
        per_class=3,
        held_out_share=0.3,  # of private classes' images that no party has; the others are test images
        seed=0,
    )
    config.parties = dict(networks="digits", narrower=1)
    config.algorithm = defaults.fed_md(
        alignment_size=200,  # 5,000
        digest_batch_size=64,  # 128 or 256
    )
    config.phases = defaults.phases(
        evaluate_every=5,
        public=dict(epochs=20, batch_size=32, patience=3, min_delta=0.005),  # batches of 128
    )
    config.evaluation = defaults.evaluation(1, 10)
    config.execution = defaults.plain_execution(processes=1)
    return config
