from fedcodist.algorithms.clients.apfl import APFLHyper as APFLHyper
from fedcodist.algorithms.clients.apfl import apfl as apfl
from fedcodist.algorithms.clients.ditto import DittoHyper as DittoHyper
from fedcodist.algorithms.clients.ditto import ditto as ditto
from fedcodist.algorithms.clients.fed_avg import FedAvgHyper as FedAvgHyper
from fedcodist.algorithms.clients.fed_avg import fed_avg as fed_avg
from fedcodist.algorithms.clients.fed_avg import fed_opt as fed_opt
from fedcodist.algorithms.clients.fed_avg import linear_decay as linear_decay
from fedcodist.algorithms.clients.fed_babu import fed_babu as fed_babu
from fedcodist.algorithms.clients.fed_bn import fed_bn as fed_bn
from fedcodist.algorithms.clients.fed_dropout import fed_dropout as fed_dropout
from fedcodist.algorithms.clients.fed_gkd import FedGKDHyper as FedGKDHyper
from fedcodist.algorithms.clients.fed_gkd import fed_gkd as fed_gkd
from fedcodist.algorithms.clients.fed_kd import FedKDHyper as FedKDHyper
from fedcodist.algorithms.clients.fed_kd import fed_kd as fed_kd
from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses as MutualLosses
from fedcodist.algorithms.clients.fed_ntd import FedNTDHyper as FedNTDHyper
from fedcodist.algorithms.clients.fed_ntd import fed_ntd as fed_ntd
from fedcodist.algorithms.clients.fed_per import fed_per as fed_per
from fedcodist.algorithms.clients.fed_prox import FedProxHyper as FedProxHyper
from fedcodist.algorithms.clients.fed_prox import fed_prox as fed_prox
from fedcodist.algorithms.clients.fed_rep import fed_rep as fed_rep
from fedcodist.algorithms.clients.fetch_sgd import FetchSGDHyper as FetchSGDHyper
from fedcodist.algorithms.clients.fetch_sgd import fetch_sgd as fetch_sgd
from fedcodist.algorithms.clients.lg_fed_avg_one import lg_fed_avg_one as lg_fed_avg_one
from fedcodist.algorithms.clients.moon import MoonHyper as MoonHyper
from fedcodist.algorithms.clients.moon import moon as moon
from fedcodist.algorithms.clients.p_fed_me import PFedMeHyper as PFedMeHyper
from fedcodist.algorithms.clients.p_fed_me import p_fed_me as p_fed_me
from fedcodist.algorithms.clients.partially_shared import partially_shared as partially_shared
from fedcodist.algorithms.clients.per_fed_avg import PerFedAvgHyper as PerFedAvgHyper
from fedcodist.algorithms.clients.per_fed_avg import per_fed_avg as per_fed_avg
from fedcodist.algorithms.clients.scaffold import scaffold as scaffold
from fedcodist.algorithms.graph.centralised import centralised as centralised
from fedcodist.algorithms.graph.decentralised_fed_avg import (
    decentralised_fed_avg as decentralised_fed_avg,
)
from fedcodist.algorithms.graph.decentralised_periodic_codistillation import (
    DecentralisedPeriodicHyper as DecentralisedPeriodicHyper,
)
from fedcodist.algorithms.graph.decentralised_periodic_codistillation import (
    decentralised_periodic_codistillation as decentralised_periodic_codistillation,
)
from fedcodist.algorithms.graph.local_only_steps import LocalOnlyStepsHyper as LocalOnlyStepsHyper
from fedcodist.algorithms.graph.local_only_steps import local_only_steps as local_only_steps
from fedcodist.algorithms.graph.mhd_exchange import CheckpointExchange as CheckpointExchange
from fedcodist.algorithms.graph.mhd_losses import HeadDistillation as HeadDistillation
from fedcodist.algorithms.graph.multi_headed_distillation import MHDHyper as MHDHyper
from fedcodist.algorithms.graph.multi_headed_distillation import (
    multi_headed_distillation as multi_headed_distillation,
)
from fedcodist.algorithms.graph.public_answers import PublicAnswers as PublicAnswers
from fedcodist.algorithms.parties.alignment import Alignment as Alignment
from fedcodist.algorithms.parties.ds_fl import DSFLHyper as DSFLHyper
from fedcodist.algorithms.parties.ds_fl import ds_fl as ds_fl
from fedcodist.algorithms.parties.fccl import FCCLHyper as FCCLHyper
from fedcodist.algorithms.parties.fccl import fccl as fccl
from fedcodist.algorithms.parties.fd import FDHyper as FDHyper
from fedcodist.algorithms.parties.fd import FDVariant as FDVariant
from fedcodist.algorithms.parties.fd import fd as fd
from fedcodist.algorithms.parties.fed_gen import FedGenHyper as FedGenHyper
from fedcodist.algorithms.parties.fed_gen import fed_gen as fed_gen
from fedcodist.algorithms.parties.fed_gh import FedGHHyper as FedGHHyper
from fedcodist.algorithms.parties.fed_gh import fed_gh as fed_gh
from fedcodist.algorithms.parties.fed_l2g import FedL2GHyper as FedL2GHyper
from fedcodist.algorithms.parties.fed_l2g import fed_l2g as fed_l2g
from fedcodist.algorithms.parties.fed_md import FedMDHyper as FedMDHyper
from fedcodist.algorithms.parties.fed_md import fed_md as fed_md
from fedcodist.algorithms.parties.fed_mrl import FedMRLHyper as FedMRLHyper
from fedcodist.algorithms.parties.fed_mrl import fed_mrl as fed_mrl
from fedcodist.algorithms.parties.fed_proto import FedProtoHyper as FedProtoHyper
from fedcodist.algorithms.parties.fed_proto import fed_proto as fed_proto
from fedcodist.algorithms.parties.fed_tgp import FedTGPHyper as FedTGPHyper
from fedcodist.algorithms.parties.fed_tgp import fed_tgp as fed_tgp
from fedcodist.algorithms.parties.fml import FMLHyper as FMLHyper
from fedcodist.algorithms.parties.fml import fml as fml
from fedcodist.algorithms.parties.groups import PartyGroup as PartyGroup
from fedcodist.algorithms.parties.head_generator import Generator as Generator
from fedcodist.algorithms.parties.knowledge_coefficients import Coefficients as Coefficients
from fedcodist.algorithms.parties.kt_pfl import KTpFLHyper as KTpFLHyper
from fedcodist.algorithms.parties.kt_pfl import kt_pfl as kt_pfl
from fedcodist.algorithms.parties.lg_fed_avg import LGFedAvgHyper as LGFedAvgHyper
from fedcodist.algorithms.parties.lg_fed_avg import lg_fed_avg as lg_fed_avg
from fedcodist.algorithms.parties.local_only import LocalOnlyHyper as LocalOnlyHyper
from fedcodist.algorithms.parties.local_only import local_only as local_only
from fedcodist.algorithms.parties.open_examples import OpenExamples as OpenExamples
from fedcodist.algorithms.parties.prototypes import ServerTraining as ServerTraining
from fedcodist.algorithms.parties.public_correlation import PublicBatches as PublicBatches
from fedcodist.algorithms.pools.codistillation import CodistillationHyper as CodistillationHyper
from fedcodist.algorithms.pools.codistillation import TeachingHyper as TeachingHyper
from fedcodist.algorithms.pools.cohorts import PoissonCohort as PoissonCohort
from fedcodist.algorithms.pools.depth_fl import DepthFLHyper as DepthFLHyper
from fedcodist.algorithms.pools.depth_fl import depth_fl as depth_fl
from fedcodist.algorithms.pools.fed_be import FedBEHyper as FedBEHyper
from fedcodist.algorithms.pools.fed_be import fed_be as fed_be
from fedcodist.algorithms.pools.fed_df import FedDFHyper as FedDFHyper
from fedcodist.algorithms.pools.fed_df import fed_df as fed_df
from fedcodist.algorithms.pools.fed_df_validation import FedDFValidation as FedDFValidation
from fedcodist.algorithms.pools.fed_ensemble import fed_ensemble as fed_ensemble
from fedcodist.algorithms.pools.fed_et import FedETHyper as FedETHyper
from fedcodist.algorithms.pools.fed_et import fed_et as fed_et
from fedcodist.algorithms.pools.fed_rolex import FedRolexAdjustments as FedRolexAdjustments
from fedcodist.algorithms.pools.fed_rolex import fed_rolex as fed_rolex
from fedcodist.algorithms.pools.fed_sdd import FedSDDHyper as FedSDDHyper
from fedcodist.algorithms.pools.fed_sdd import FedSDDTeaching as FedSDDTeaching
from fedcodist.algorithms.pools.fed_sdd import fed_sdd as fed_sdd
from fedcodist.algorithms.pools.fed_sdd_pools import FedSDDPoolsHyper as FedSDDPoolsHyper
from fedcodist.algorithms.pools.fed_sdd_pools import fed_sdd_pools as fed_sdd_pools
from fedcodist.algorithms.pools.fjord import FjordHyper as FjordHyper
from fedcodist.algorithms.pools.fjord import fjord as fjord
from fedcodist.algorithms.pools.hetero_fl import HeteroFLAdjustments as HeteroFLAdjustments
from fedcodist.algorithms.pools.hetero_fl import HeteroFLLevel as HeteroFLLevel
from fedcodist.algorithms.pools.hetero_fl import hetero_fl as hetero_fl
from fedcodist.algorithms.pools.independent_pools import independent_pools as independent_pools
from fedcodist.algorithms.pools.merged_codistillation import MergedHyper as MergedHyper
from fedcodist.algorithms.pools.merged_codistillation import (
    merged_codistillation as merged_codistillation,
)
from fedcodist.algorithms.pools.periodic_codistillation import (
    periodic_codistillation as periodic_codistillation,
)
from fedcodist.algorithms.pools.pool import Pool as Pool
from fedcodist.algorithms.pools.pool import private_cohorts as private_cohorts
from fedcodist.compression.compressed import compressed as compressed
from fedcodist.compression.compressor import Compressor as Compressor
from fedcodist.compression.count_sketch import count_sketch as count_sketch
from fedcodist.compression.error_feedback import with_error_feedback as with_error_feedback
from fedcodist.compression.quantisation import quantisation as quantisation
from fedcodist.compression.svd import svd as svd
from fedcodist.compression.top_k import top_k as top_k
from fedcodist.core.aggregation import Aggregate as Aggregate
from fedcodist.core.aggregation import ClientResult as ClientResult
from fedcodist.core.aggregation import Reduce as Reduce
from fedcodist.core.example_losses import per_example as per_example
from fedcodist.core.for_each_client import Execution as Execution
from fedcodist.core.local_steps import StepTraining as StepTraining
from fedcodist.core.local_training import LocalTraining as LocalTraining
from fedcodist.core.local_training import train_client as train_client
from fedcodist.core.method import FederatedAlgorithm as FederatedAlgorithm
from fedcodist.core.method import FederatedMethod as FederatedMethod
from fedcodist.core.model import Model as Model
from fedcodist.core.model import Variables as Variables
from fedcodist.core.model import from_flax_linen as from_flax_linen
from fedcodist.core.model import from_flax_nnx as from_flax_nnx
from fedcodist.core.model import from_haiku as from_haiku
from fedcodist.core.precision import in_bfloat16 as in_bfloat16
from fedcodist.core.rematerialisation import rematerialised as rematerialised
from fedcodist.core.summed_metrics import SummedMetric as SummedMetric
from fedcodist.data.feature_skew import feature_noise as feature_noise
from fedcodist.data.feature_skew import feature_rotation as feature_rotation
from fedcodist.data.federated_data import FederatedData as FederatedData
from fedcodist.data.fedjax_sqlite import from_fedjax_sqlite as from_fedjax_sqlite
from fedcodist.data.flower import from_flower as from_flower
from fedcodist.data.hugging_face import from_hugging_face as from_hugging_face
from fedcodist.data.leaf import from_leaf as from_leaf
from fedcodist.data.npz import from_npz as from_npz
from fedcodist.data.partition import capacity_pools as capacity_pools
from fedcodist.data.prepared import load_prepared as load_prepared
from fedcodist.data.prepared import save_prepared as save_prepared
from fedcodist.data.torchvision import from_torchvision as from_torchvision
from fedcodist.data.within_clients import train_test_within_clients as train_test_within_clients
from fedcodist.data.within_clients import unseen_clients as unseen_clients
from fedcodist.datasets.digits import load_digits_federated as load_digits_federated
from fedcodist.distillation.early_stopping import EarlyStopping as EarlyStopping
from fedcodist.distillation.loop import Distillation as Distillation
from fedcodist.distillation.validation import ValidationData as ValidationData
from fedcodist.distillation.weight_averaging import WeightAveraging as WeightAveraging
from fedcodist.models.exits import with_exits as with_exits
from fedcodist.models.headed import headed as headed
from fedcodist.models.multi_headed import multi_headed as multi_headed
from fedcodist.privacy.accounting import PrivacyBudget as PrivacyBudget
from fedcodist.privacy.accounting import calibrated_noise_multiplier as calibrated_noise_multiplier
from fedcodist.privacy.adaptive_clipping import AdaptiveClip as AdaptiveClip
from fedcodist.privacy.audit import epsilon_lower_bound as epsilon_lower_bound
from fedcodist.privacy.audit import guesses_of as guesses_of
from fedcodist.privacy.banded_noise import BandedNoise as BandedNoise
from fedcodist.privacy.example_level import example_epsilon as example_epsilon
from fedcodist.privacy.example_level import example_private as example_private
from fedcodist.privacy.private import private as private
from fedcodist.privacy.private_parties import counted as counted
from fedcodist.privacy.private_parties import private_classes as private_classes
from fedcodist.privacy.private_parties import private_scores as private_scores
from fedcodist.privacy.secure_sum import secure_sum as secure_sum
from fedcodist.privacy.secure_sum_reduce import secure_sum_reduce as secure_sum_reduce
from fedcodist.report.partition_plot import plot_partition as plot_partition
from fedcodist.run.callbacks import Decision as Decision
from fedcodist.run.chunk_size import choose_chunk_size as choose_chunk_size
from fedcodist.run.client_splits import ClientSplit as ClientSplit
from fedcodist.run.experiment import Experiment as Experiment
from fedcodist.run.experiment import run_experiment as run_experiment
from fedcodist.run.export import load_model as load_model
from fedcodist.run.export import save_model as save_model
from fedcodist.run.fedjax_adapter import as_fedjax as as_fedjax
from fedcodist.run.sources import StreamedData as StreamedData
from fedcodist.run.sources import resident_data as resident_data
from fedcodist.run.stopping import KeepBest as KeepBest
from fedcodist.run.stopping import StopEarly as StopEarly
from fedcodist.text.next_token import language_model as language_model

__version__: str
__all__: list[str]
