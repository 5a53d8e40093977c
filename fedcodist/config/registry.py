"""The methods, by the names that configs give them, and what a run is called."""

from collections.abc import Mapping
from typing import Any

# In the order of tables and legends.
METHOD_NAMES = {
    "fed_avg": "FedAvg",
    "fed_prox": "FedProx",
    "fed_gkd": "FedGKD",
    "scaffold": "SCAFFOLD",
    "hetero_fl": "HeteroFL",
    "fetch_sgd": "FetchSGD",
    "fed_dropout": "FedDropout",
    "fed_kd": "FedKD",
    "fed_df": "FedDF",
    "fed_be": "FedBE",
    "fed_sdd": "FedSDD",
    "fed_ensemble": "Fed-ensemble",
    "local_only": "no collaboration",
    "fed_md": "FedMD",
    "fd": "FD",
    "ds_fl": "DS-FL",
    "fml": "FML",
    "local_only_steps": "separate clients",
    "decentralised_fed_avg": "decentralised FedAvg",
    "decentralised_periodic_codistillation": "decentralised PeriodicCodist",
    "multi_headed_distillation": "MHD",
    "centralised": "all examples in one place",
    "periodic_codistillation": "PeriodicCodist",
    "merged_codistillation": "MergedCodist",
}
# Of clients on a graph who have a model each.
DECENTRALISED = (
    "local_only_steps",
    "decentralised_fed_avg",
    "decentralised_periodic_codistillation",
    "multi_headed_distillation",
)
BASELINE = "fed_avg"
# Those of servers that read no unlabelled data.
WITHOUT_UNLABELLED = (BASELINE, "hetero_fl", "fed_ensemble")
CODISTILLATION = ("periodic_codistillation", "merged_codistillation")
# Those of the codistillation paper.
METHODS = (BASELINE, *CODISTILLATION)


def method_of(config: Mapping[str, Any]) -> str:
    """What the server does, or where that is FedAvg's, what the clients do; a phase's name, where a run
    is one, or the experiment's, where the config names no algorithm."""
    algorithm = config.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    training = config.get("training")
    if name == BASELINE and isinstance(training, Mapping):
        name = training.get("method", name)
    if not name and config.get("phase"):
        name = f"{config['phase']} training"
    return str(name or config.get("name") or "unnamed")


def run_title(config: Mapping[str, Any]) -> str:
    """What a run is called beside its progress: experiment, run and method, where each tells more."""
    parts = (config.get("name"), config.get("run"), method_of(config))
    return " · ".join(dict.fromkeys(str(part) for part in parts if part))
