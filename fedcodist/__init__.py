"""FedCodist: federated learning of heterogeneous models by knowledge distillation, in JAX.

The names that experiments are written with are available as `fedcodist.name`; they are imported when
first used, so that the launcher starts without waiting for JAX.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "Aggregate": "aggregation",
    "Averaging": "distillation",
    "ClientResult": "aggregation",
    "CodistillationHyper": "algorithms.codistillation",
    "Compressor": "compression.compressor",
    "DSFLHyper": "algorithms.ds_fl",
    "DecentralisedPeriodicHyper": "algorithms.decentralised_periodic_codistillation",
    "Distillation": "distillation",
    "EarlyStopping": "distillation",
    "Execution": "for_each_client",
    "Experiment": "experiment",
    "FDHyper": "algorithms.fd",
    "FMLHyper": "algorithms.fml",
    "FedAvgHyper": "algorithms.fed_avg",
    "FedBEHyper": "algorithms.fed_be",
    "FedDFHyper": "algorithms.fed_df",
    "FedGKDHyper": "algorithms.fed_gkd",
    "FedKDHyper": "algorithms.fed_kd",
    "FedMDHyper": "algorithms.fed_md",
    "FedProxHyper": "algorithms.fed_prox",
    "FedSDDHyper": "algorithms.fed_sdd",
    "FederatedAlgorithm": "federated_algorithm",
    "FederatedData": "data.federated_data",
    "FederatedMethod": "federated_algorithm",
    "FetchSGDHyper": "algorithms.fetch_sgd",
    "Group": "algorithms.parties",
    "HeadDistillation": "algorithms.multi_headed_distillation",
    "IsolatedHyper": "algorithms.isolated",
    "Level": "algorithms.hetero_fl",
    "LocalTraining": "client_training",
    "MergedHyper": "algorithms.merged_codistillation",
    "MHDHyper": "algorithms.multi_headed_distillation",
    "Model": "model",
    "Mutual": "algorithms.mutual_losses",
    "Pool": "algorithms.pools",
    "Reduce": "aggregation",
    "SeparateHyper": "algorithms.separate",
    "StepTraining": "step_training",
    "StreamedData": "sources",
    "TeachingHyper": "algorithms.codistillation",
    "Validated": "validation",
    "Variables": "model",
    "as_fedjax": "federated_algorithm",
    "capacity_pools": "data.partition",
    "choose_chunk_size": "chunk_size",
    "compressed": "compression.compressed",
    "count_sketch": "compression.count_sketch",
    "decentralised_fed_avg": "algorithms.decentralised_fed_avg",
    "decentralised_periodic_codistillation": "algorithms.decentralised_periodic_codistillation",
    "ds_fl": "algorithms.ds_fl",
    "fd": "algorithms.fd",
    "fed_avg": "algorithms.fed_avg",
    "fed_be": "algorithms.fed_be",
    "fed_df": "algorithms.fed_df",
    "fed_dropout": "algorithms.fed_dropout",
    "fed_ensemble": "algorithms.fed_ensemble",
    "fed_gkd": "algorithms.fed_gkd",
    "fed_kd": "algorithms.fed_kd",
    "fed_md": "algorithms.fed_md",
    "fed_prox": "algorithms.fed_prox",
    "fed_sdd": "algorithms.fed_sdd",
    "fetch_sgd": "algorithms.fetch_sgd",
    "fml": "algorithms.fml",
    "from_flax_linen": "model",
    "from_flax_nnx": "model",
    "from_haiku": "model",
    "hetero_fl": "algorithms.hetero_fl",
    "in_bfloat16": "precision",
    "independent_pools": "algorithms.pools",
    "isolated": "algorithms.isolated",
    "language_model": "next_token",
    "linear_decay": "algorithms.fed_avg",
    "load_digits_federated": "data.digits",
    "load_model": "export",
    "load_prepared": "data.prepared",
    "merged_codistillation": "algorithms.merged_codistillation",
    "multi_headed": "models.multi_headed",
    "multi_headed_distillation": "algorithms.multi_headed_distillation",
    "periodic_codistillation": "algorithms.periodic_codistillation",
    "pooled": "algorithms.pooled",
    "quantisation": "compression.quantisation",
    "rematerialised": "rematerialisation",
    "resident_data": "sources",
    "run_experiment": "experiment",
    "save_model": "export",
    "save_prepared": "data.prepared",
    "scaffold": "algorithms.scaffold",
    "separate": "algorithms.separate",
    "svd": "compression.svd",
    "top_k": "compression.top_k",
    "train_client": "client_training",
    "with_error_feedback": "compression.error_feedback",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedcodist' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedcodist.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
