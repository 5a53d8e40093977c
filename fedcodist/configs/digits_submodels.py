r"""Methods whose clients train parts of one network, on scikit-learn's handwritten digits.

20 clients have three capacities. A run is a method's name. All runs have the same clients of every
capacity, cohorts, batches and steps. They differ in the part of the network that a client trains, and in
how it is trained. DepthFL's network has an exit after each block, the others' has none.

    fedcodist compare digits_submodels
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults

SHARES = {"small": 0.25, "medium": 0.5, "large": 1.0}  # of the units of each hidden layer


def get_runs() -> list[str]:
    """Methods with parts of fewer units, then with parts of fewer blocks."""
    return ["hetero_fl", "fed_rolex", "fjord", "depth_fl"]


def get_config(run: str = "hetero_fl") -> ConfigDict:
    """Returns one method's experiment."""
    defaults.check_run(run, get_runs())
    config = defaults.experiment("digits_submodels", 60, run, seeds=3)
    config.data = dict(name="digits", num_clients=20, concentration=0.3, seed=0)
    config.training = defaults.training(batch_size=10, epochs=2)
    pools = {}
    for name, share in SHARES.items():
        (pool,) = defaults.one_pool("digits_large", 3, 0.1).values()
        pools[name] = pool | dict(share=share, fraction=0.5 if name == "small" else 0.25)
    config.pools = pools
    config.nested_pools = False  # a client has one capacity
    config.algorithm = dict(name=run)
    if run in ("hetero_fl", "fed_rolex"):
        config.algorithm.update(masked=True, scaled=True)
    if run == "fed_rolex":
        config.algorithm.units_per_round = 1
    if run == "fjord":
        config.algorithm.update(self_distillation=True, distillation_weight=1.0, temperature=1.0)
    if run == "depth_fl":
        config.algorithm.update(distillation_weight=1.0, ramp_up=0)
        for depth, pool in enumerate(config.pools.values(), 1):
            pool.model, pool.depth = "digits_exits", depth
            del pool.share
    config.evaluation = defaults.evaluation(5, 20)
    config.execution = defaults.execution(processes=1)
    return config
