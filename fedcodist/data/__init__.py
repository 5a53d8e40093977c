"""Federated data sets: columns with client offsets, partitions, prepared folders and adapters."""

from fedcodist.data.client_pools import capacity_pools, merge_clients, pools_from_ids, split_clients
from fedcodist.data.feature_skew import feature_noise, feature_rotation
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.fedjax_sqlite import from_fedjax_sqlite
from fedcodist.data.flower import from_flower
from fedcodist.data.hugging_face import from_hugging_face
from fedcodist.data.leaf import from_leaf
from fedcodist.data.npz import from_npz
from fedcodist.data.partition import (
    by_id,
    dirichlet,
    equal_dirichlet,
    iid,
    pachinko,
    pathological,
    quantity_dirichlet,
    quantity_log_normal,
    shards,
)
from fedcodist.data.prepared import PreparedDataError, load_prepared, manifest, save_prepared
from fedcodist.data.text import domain_pools, of_domain, text_splits, vocabulary_of
from fedcodist.data.tfds import from_tfds
from fedcodist.data.tff import from_client_data, from_sqlite
from fedcodist.data.torchvision import from_torchvision
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
    "feature_noise",
    "feature_rotation",
    "from_client_data",
    "from_fedjax_sqlite",
    "from_flower",
    "from_hugging_face",
    "from_leaf",
    "from_npz",
    "from_sqlite",
    "from_tfds",
    "from_torchvision",
    "iid",
    "load_prepared",
    "manifest",
    "merge_clients",
    "of_domain",
    "pachinko",
    "pathological",
    "pools_from_ids",
    "quantity_dirichlet",
    "quantity_log_normal",
    "save_prepared",
    "shards",
    "split_clients",
    "text_splits",
    "vocabulary_of",
]
