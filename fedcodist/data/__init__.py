"""Federated data sets: columns with client offsets, partitions, prepared folders and adapters."""

from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import (
    by_id,
    capacity_pools,
    dirichlet,
    equal_dirichlet,
    iid,
    merge_clients,
    pachinko,
    pools_from_ids,
    shards,
    split_clients,
)
from fedcodist.data.prepared import PreparedDataError, load_prepared, manifest, save_prepared
from fedcodist.data.text import domain_pools, of_domain, text_splits, vocabulary_of
from fedcodist.data.tfds import from_tfds
from fedcodist.data.tff import from_client_data, from_sqlite
from fedcodist.data.vocabulary import Vocabulary

__all__ = [
    "FederatedData",
    "PreparedDataError",
    "Vocabulary",
    "by_id",
    "capacity_pools",
    "dirichlet",
    "domain_pools",
    "equal_dirichlet",
    "from_client_data",
    "from_sqlite",
    "from_tfds",
    "iid",
    "load_prepared",
    "manifest",
    "merge_clients",
    "of_domain",
    "pachinko",
    "pools_from_ids",
    "save_prepared",
    "shards",
    "split_clients",
    "text_splits",
    "vocabulary_of",
]
