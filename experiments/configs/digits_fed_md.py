r"""FedMD on scikit-learn's handwritten digits: six parties of three architectures; no download.

Digits 0 to 5 are public, 6 to 9 the parties' private classes, of which each has three images. Settings
that the released code has for CIFAR are in comments where these differ.

    python -m experiments.main --config experiments/configs/digits_fed_md.py --workdir runs/digits_fed_md
    python -m fedcodist.report.tables_parties runs/digits_fed_md
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    """Returns the experiment."""
    config = ConfigDict()
    config.name = "digits_fed_md"
    config.rounds = 20
    config.seed = 0
    config.seeds = 1

    config.data = dict(
        name="digits_public_private",
        num_parties=6,
        per_class=3,
        held_out_share=0.3,  # of the private classes' images that no party has; the others are tests
        seed=0,
    )
    config.parties = dict(networks="digits", narrower=1)
    config.algorithm = dict(
        name="fed_md",
        alignment_size=200,  # 5,000; the number of all public images takes all
        exchanged="logits",  # or "probabilities", at the temperature
        temperature=1.0,
        learning_rate=1e-3,
        epsilon=1e-7,
        digest_epochs=1,
        digest_batch_size=64,  # 128 or 256
        revisit_epochs=4,
        revisit_batch_size=5,
        output_penalty=1e-3,
        weights=config_dict.placeholder(tuple),  # one number per party, in place of equal ones
    )
    config.phases = dict(
        stopping="held_out",  # or "fixed", or "test_data" as in the released code
        held_out_share=0.1,  # of the public training data
        evaluate_every=5,  # epochs
        public=dict(epochs=20, batch_size=32, patience=3, min_delta=0.005),
        private=dict(epochs=25, batch_size=32, patience=10, min_delta=0.001),
        centralised=dict(epochs=50, batch_size=32, patience=10, min_delta=0.001),
        centralised_bound=True,
        cache=config_dict.placeholder(str),  # a folder where public training is kept for other runs
    )
    config.evaluation = dict(
        every=1, batch_size=500, checkpoint_every=10, splits=("held_out",), final_splits=("test",)
    )
    config.execution = dict(processes=1, loop="scan", chunk_size=1, seeds_loop="map", stream=False)
    return config
