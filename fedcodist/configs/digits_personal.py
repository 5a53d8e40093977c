r"""Methods whose clients keep a personal model, or parts of one, on scikit-learn's digits.

A run is a method's name. All methods have the same cohorts, batches and initial weights, and the same
clients, whose labels differ strongly. The network has a batch normalisation, which FedBN keeps at each
client. Models are evaluated on each client's own test examples, the split `client_test`: the shared
model is `main`, the personal one `main_personal`, and after one more local training they are
`main_fine_tuned` and `main_personal_fine_tuned`. FedBABU has no personal model until it is fine-tuned.

    fedcodist compare digits_personal

FedAvg's shared model reaches 93.0 % of all test examples. FedBN's personal models gain 2.8 points over
it and pFedMe's 1.4 (docs/results/heterogeneous.md).
"""

from ml_collections import ConfigDict, config_dict

from fedcodist.config import defaults

OUTPUT_LAYER = "Dense_1"  # of digits_normalised, 32-10
# Each method's own settings.
METHODS: dict[str, dict] = {
    "fed_avg": {},
    "fed_per": dict(private=OUTPUT_LAYER),
    "fed_rep": dict(private=OUTPUT_LAYER, head_epochs=5),
    "fed_bn": dict(private="*[Nn]orm*"),
    "fed_babu": dict(private=OUTPUT_LAYER),
    "lg_fed_avg_one": dict(shared=OUTPUT_LAYER),
    "ditto": dict(personal_epochs=2, proximal_weight=1.0),
    "apfl": dict(alpha=0.5, alpha_learning_rate=0.1),
    "p_fed_me": dict(personal_steps=5, personal_learning_rate=0.1, proximal_weight=15.0),
    "per_fed_avg": dict(
        variant="first_order",  # or "hessian_free"
        adaptation_rate=0.1,
        difference=1e-3,  # of hessian_free
    ),
}


def get_runs() -> list[str]:
    """FedAvg first."""
    return list(METHODS)


def get_config(run: str = "fed_per") -> ConfigDict:
    """Returns one method's experiment."""
    defaults.check_run(run, get_runs())
    config = defaults.experiment("digits_personal", 60, run, seeds=3)
    config.data = dict(
        name="digits",
        num_clients=20,
        concentration=0.1,
        division_per_seed=False,
        client_test_share=0.25,  # of each client's examples
        unseen_clients=config_dict.placeholder(int),  # do not train, but are evaluated too
        seed=0,
    )
    config.training = defaults.training(method=run, batch_size=10, epochs=2)
    if METHODS[run]:
        config.training[run] = METHODS[run]
    # pFedMe's step moves the model by learning rate x proximal_weight of the way to the personal model.
    rate = 0.05 if run == "p_fed_me" else 0.1
    config.pools = defaults.one_pool("digits_normalised", 8, rate)
    config.nested_pools = True

    config.algorithm = dict(name="fed_avg")
    config.evaluation = defaults.evaluation(5, 20)
    config.execution = defaults.execution(processes=1)
    return config
