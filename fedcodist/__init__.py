"""FedCodist: federated learning of heterogeneous models by knowledge distillation, in JAX.

The names that experiments are written with are available as `fedcodist.name`; they are imported when
first used, so that the launcher starts without waiting for JAX.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "Aggregate": "core.aggregation",
    "Alignment": "algorithms.parties.alignment",
    "CheckpointExchange": "algorithms.graph.mhd_exchange",
    "ClientResult": "core.aggregation",
    "CodistillationHyper": "algorithms.pools.codistillation",
    "Compressor": "compression.compressor",
    "DecentralisedPeriodicHyper": "algorithms.graph.decentralised_periodic_codistillation",
    "Distillation": "distillation.loop",
    "DSFLHyper": "algorithms.parties.ds_fl",
    "EarlyStopping": "distillation.early_stopping",
    "Execution": "core.for_each_client",
    "Experiment": "run.experiment",
    "FDHyper": "algorithms.parties.fd",
    "FedAvgHyper": "algorithms.clients.fed_avg",
    "FedBEHyper": "algorithms.pools.fed_be",
    "FedDFHyper": "algorithms.pools.fed_df",
    "FedDFValidation": "algorithms.pools.fed_df_validation",
    "FederatedAlgorithm": "core.method",
    "FederatedData": "data.federated_data",
    "FederatedMethod": "core.method",
    "FedGKDHyper": "algorithms.clients.fed_gkd",
    "FedKDHyper": "algorithms.clients.fed_kd",
    "FedMDHyper": "algorithms.parties.fed_md",
    "FedProxHyper": "algorithms.clients.fed_prox",
    "FedSDDHyper": "algorithms.pools.fed_sdd",
    "FedSDDTeaching": "algorithms.pools.fed_sdd",
    "FetchSGDHyper": "algorithms.clients.fetch_sgd",
    "FMLHyper": "algorithms.parties.fml",
    "HeadDistillation": "algorithms.graph.mhd_losses",
    "HeteroFLAdjustments": "algorithms.pools.hetero_fl",
    "HeteroFLLevel": "algorithms.pools.hetero_fl",
    "LocalOnlyHyper": "algorithms.parties.local_only",
    "LocalOnlyStepsHyper": "algorithms.graph.local_only_steps",
    "LocalTraining": "core.local_training",
    "MergedHyper": "algorithms.pools.merged_codistillation",
    "MHDHyper": "algorithms.graph.multi_headed_distillation",
    "Model": "core.model",
    "MutualLosses": "algorithms.clients.fed_kd_losses",
    "OpenExamples": "algorithms.parties.ds_fl",
    "PartyGroup": "algorithms.parties.groups",
    "Pool": "algorithms.pools.pool",
    "PublicAnswers": "algorithms.graph.decentralised_periodic_codistillation",
    "Reduce": "core.aggregation",
    "StepTraining": "core.local_steps",
    "StreamedData": "run.sources",
    "TeachingHyper": "algorithms.pools.codistillation",
    "ValidationData": "distillation.validation",
    "Variables": "core.model",
    "WeightAveraging": "distillation.weight_averaging",
    "as_fedjax": "run.fedjax_adapter",
    "capacity_pools": "data.partition",
    "centralised": "algorithms.graph.centralised",
    "choose_chunk_size": "run.chunk_size",
    "compressed": "compression.compressed",
    "count_sketch": "compression.count_sketch",
    "decentralised_fed_avg": "algorithms.graph.decentralised_fed_avg",
    "decentralised_periodic_codistillation": "algorithms.graph.decentralised_periodic_codistillation",
    "ds_fl": "algorithms.parties.ds_fl",
    "fd": "algorithms.parties.fd",
    "fed_avg": "algorithms.clients.fed_avg",
    "fed_be": "algorithms.pools.fed_be",
    "fed_df": "algorithms.pools.fed_df",
    "fed_dropout": "algorithms.clients.fed_dropout",
    "fed_ensemble": "algorithms.pools.fed_ensemble",
    "fed_gkd": "algorithms.clients.fed_gkd",
    "fed_kd": "algorithms.clients.fed_kd",
    "fed_md": "algorithms.parties.fed_md",
    "fed_opt": "algorithms.clients.fed_avg",
    "fed_prox": "algorithms.clients.fed_prox",
    "fed_sdd": "algorithms.pools.fed_sdd",
    "fetch_sgd": "algorithms.clients.fetch_sgd",
    "fml": "algorithms.parties.fml",
    "from_flax_linen": "core.model",
    "from_flax_nnx": "core.model",
    "from_haiku": "core.model",
    "hetero_fl": "algorithms.pools.hetero_fl",
    "in_bfloat16": "core.precision",
    "independent_pools": "algorithms.pools.independent_pools",
    "language_model": "text.next_token",
    "linear_decay": "algorithms.clients.fed_avg",
    "load_digits_federated": "datasets.digits",
    "load_model": "run.export",
    "load_prepared": "data.prepared",
    "local_only": "algorithms.parties.local_only",
    "local_only_steps": "algorithms.graph.local_only_steps",
    "merged_codistillation": "algorithms.pools.merged_codistillation",
    "multi_headed": "models.multi_headed",
    "multi_headed_distillation": "algorithms.graph.multi_headed_distillation",
    "per_example": "core.example_losses",
    "periodic_codistillation": "algorithms.pools.periodic_codistillation",
    "quantisation": "compression.quantisation",
    "rematerialised": "core.rematerialisation",
    "resident_data": "run.sources",
    "run_experiment": "run.experiment",
    "save_model": "run.export",
    "save_prepared": "data.prepared",
    "scaffold": "algorithms.clients.scaffold",
    "svd": "compression.svd",
    "top_k": "compression.top_k",
    "train_client": "core.local_training",
    "with_error_feedback": "compression.error_feedback",
}
# Names of earlier commits, for the message of the AttributeError.
_NOW_CALLED = {
    "Averaging": "WeightAveraging",
    "Group": "PartyGroup",
    "IsolatedHyper": "LocalOnlyHyper",
    "Level": "HeteroFLLevel",
    "Mutual": "MutualLosses",
    "SeparateHyper": "LocalOnlyStepsHyper",
    "Validated": "FedDFValidation",
    "isolated": "local_only",
    "pooled": "centralised",
    "separate": "local_only_steps",
}
__version__ = "0.1.0"
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"fedcodist.{_MODULE_OF[name]}"), name)
    hint = f"; it is called {_NOW_CALLED[name]!r} now" if name in _NOW_CALLED else ""
    raise AttributeError(f"module 'fedcodist' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
