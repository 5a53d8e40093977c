"""The table of all settings of a config: their types, and the ranges in which values make sense.

A range here is that of any method or data. A method checks its arguments again, since it may be called
without a config: within the range here, its own check decides what it allows.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fedcodist.config.references import is_reference
from fedcodist.core.checks import (
    MOST_EPOCHS,
    check_boolean,
    check_integer,
    check_number,
    check_text,
    shown,
)

Check = Callable[[str, Any], None]  # (setting's path, value); raises an error that names the path

# Kinds of settings.


def _whole(low: int = 1, **high: int) -> Check:
    return lambda path, value: check_integer(path, value, low, **high)


def _number(**limits: float) -> Check:
    return lambda path, value: check_number(path, value, **limits)


def _or_none(check: Check) -> Check:
    return lambda path, value: None if value is None else check(path, value)


def _each(check: Check) -> Check:
    """Several of a kind, in a list or a tuple."""

    def check_all(path: str, values: Any) -> None:
        if not isinstance(values, list | tuple):
            raise TypeError(f"{path} must be a list, got {shown(values)}.")
        for index, value in enumerate(values):
            check(f"{path}[{index}]", value)

    return check_all


def _one_or_several(check: Check) -> Check:
    """One of a kind, or several in a list or a tuple."""
    of_several = _each(check)
    return lambda path, value: (of_several if isinstance(value, list | tuple) else check)(
        path, value
    )


def _reference(path: str, value: Any) -> None:
    if not is_reference(value):
        raise ValueError(f"{path} must be package.module:function, got {shown(value)}.")


def _networks(path: str, value: Any) -> None:
    """A name, or for each party a name or (widths, dropout)."""
    if isinstance(value, str):
        return
    if not isinstance(value, list | tuple) or not value:
        raise TypeError(
            f"{path} must be a name or a list of one network per party, got {shown(value)}."
        )
    for index, network in enumerate(value):
        if isinstance(network, str):
            continue
        if not isinstance(network, Sequence) or len(network) != 2:
            raise TypeError(
                f"{path}[{index}] must be a name or (widths, dropout), got {shown(network)}."
            )
        widths, dropout = network
        _each(_whole())(f"{path}[{index}] widths", widths)
        check_number(f"{path}[{index}] dropout", dropout, low=0, high=1)


_RATE = _number(low=0)
_SHARE = _number(above=0, high=1)
_FRACTION = _number(low=0, high=1)
_SEED = _whole(0)
_MANY = 10_000  # the limit for things whose arrays are all in memory at once

ALLOWED: dict[str, Check] = {
    "name": check_text,
    "run": check_text,
    "methods": _each(check_text),
    "rounds": _whole(),
    "full_rounds": _whole(),
    "seed": _SEED,
    "seeds": _whole(high=_MANY),
    "nested_pools": check_boolean,
    "metrics.*": check_text,
    "callbacks.*.name": check_text,
    "schedules.*.name": check_text,
    "loggers": _each(check_text),
    # data
    "data.name": check_text,
    "data.folder": check_text,
    "data.public_folder": check_text,
    "data.unlabelled_folder": _or_none(check_text),
    "data.encoder": _or_none(check_text),
    "data.frozen_tables": check_boolean,
    "data.positive_copies": _whole(high=_MANY),
    "data.preprocess": _or_none(_reference),
    "data.evaluation_preprocess": _or_none(_reference),
    "data.seed": _SEED,
    "data.division_per_seed": check_boolean,
    "data.num_clients": _whole(),
    "data.num_parties": _whole(high=_MANY),
    "data.concentration": _number(above=0),
    "data.mean": _or_none(_each(_number())),
    "data.deviation": _or_none(_each(_number(above=0))),
    "data.crop": _or_none(_whole()),
    "data.padding": _whole(0, high=_MANY),
    "data.augmentation": check_text,
    "data.num_unlabelled": _or_none(_whole()),
    "data.partition.name": check_text,
    "data.partition.num_clients": _whole(),
    "data.partition.concentration": _number(above=0),
    "data.partition.validation": _or_none(_FRACTION),
    "data.partition.all_splits": check_boolean,
    "data.partition.examples": _or_none(_whole()),
    "data.partition.labels_per_client": _whole(),
    "data.partition.shards_per_client": _whole(),
    "data.partition.examples_per_client": _whole(),
    "data.partition.root_concentration": _number(above=0),
    "data.partition.leaf_concentration": _number(above=0),
    "data.partition.together": _whole(),
    "data.partition.min_size": _whole(),
    "data.partition.balanced": check_boolean,
    "data.partition.sigma": _RATE,
    "data.partition.column": check_text,
    "data.partition.feature_noise": _or_none(_RATE),
    "data.partition.feature_rotations": _or_none(_whole(high=4)),
    "data.domains.*": _SHARE,
    "data.assignment": check_text,
    "data.labels_per_client": _whole(),
    "data.skew": _RATE,
    "data.public_share": _SHARE,
    "data.private_share": _or_none(_SHARE),
    "data.test_share": _SHARE,
    "data.client_test_share": _or_none(_number(above=0, below=1)),
    "data.unseen_clients": _or_none(_whole()),
    "data.held_out_share": _or_none(_FRACTION),
    "data.tested": check_text,
    "data.iid": check_boolean,
    "data.paper_superclasses": check_boolean,
    "data.per_class": _or_none(_whole()),
    "data.num_public": _or_none(_whole()),
    "data.smallest": _whole(0),
    # how clients train
    "training.method": check_text,
    "training.client_optimizer": check_text,
    "training.batch_size": _whole(),
    "training.epochs": _whole(),
    "training.steps": _whole(),
    "training.learning_rate": _RATE,
    "training.momentum": _or_none(_FRACTION),
    "training.server_optimizer": check_text,
    "training.server_epsilon": _or_none(_RATE),
    "training.server_schedule": check_text,
    "training.samples": _whole(0),
    "training.proximal_weight": _RATE,
    "training.scaffold_option": _whole(),
    "training.fed_gkd.models_kept": _whole(high=_MANY),
    "training.fed_gkd.weight": _RATE,
    "training.fed_gkd.temperature": _number(above=0),
    "training.fed_per.private": _one_or_several(check_text),
    "training.fed_rep.private": _one_or_several(check_text),
    "training.fed_rep.head_epochs": _whole(high=MOST_EPOCHS),
    "training.fed_bn.private": _one_or_several(check_text),
    "training.fed_babu.private": _one_or_several(check_text),
    "training.lg_fed_avg_one.shared": _one_or_several(check_text),
    "training.ditto.personal_epochs": _whole(high=MOST_EPOCHS),
    "training.ditto.proximal_weight": _RATE,
    "training.apfl.alpha": _FRACTION,
    "training.apfl.alpha_learning_rate": _RATE,
    "training.p_fed_me.personal_steps": _whole(),
    "training.p_fed_me.personal_learning_rate": _RATE,
    "training.p_fed_me.proximal_weight": _RATE,
    "training.per_fed_avg.variant": check_text,
    "training.per_fed_avg.adaptation_rate": _RATE,
    "training.per_fed_avg.difference": _number(above=0),
    "training.fed_ntd.not_true_weight": _RATE,
    "training.fed_ntd.temperature": _number(above=0),
    "training.moon.layer": _or_none(check_text),
    "training.moon.contrast_weight": _RATE,
    "training.moon.temperature": _number(above=0),
    "training.fed_dropout.share": _SHARE,
    "training.fed_kd.teacher": check_text,
    "training.fed_kd.teacher_layers": _each(check_text),
    "training.fed_kd.student_layers": _each(check_text),
    "training.fed_kd.teacher_learning_rate": _RATE,
    "training.fed_kd.output_weight": _RATE,
    "training.fed_kd.hidden_weight": _RATE,
    "training.fed_kd.exchange": check_text,
    "training.fed_kd.fresh_optimizers": check_boolean,
    "training.fed_kd.hidden_map": check_text,
    "training.fed_kd.kl_reduction": check_text,
    "training.fed_kd.adaptive": check_text,
    "training.fed_kd.detach_targets": check_boolean,
    "training.fed_kd.detach_normaliser": check_boolean,
    "training.fed_kd.without_padding": check_boolean,
    "training.fetch_sgd.sketch_rows": _whole(),
    "training.fetch_sgd.sketch_columns": _whole(),
    "training.fetch_sgd.k": _whole(),
    "training.fetch_sgd.examples_per_round": _or_none(_whole()),
    "training.fetch_sgd.momentum": _FRACTION,
    "training.fetch_sgd.seed": _SEED,
    "training.fetch_sgd.rate_in_error": check_boolean,
    "training.compression.spectra": check_boolean,
    "training.compression.gradient_spectra": check_boolean,
    "training.privacy.clip": _number(above=0),
    "training.privacy.epsilon": _or_none(_number(above=0)),
    "training.privacy.delta": _number(above=0, below=1),
    "training.privacy.noise_multiplier": _or_none(_RATE),
    "training.privacy.noise": check_text,
    "training.privacy.bands": _or_none(_whole()),
    "training.privacy.sampling": check_text,
    "training.privacy.most": _or_none(_whole()),
    "training.privacy.accountant": _or_none(check_text),
    "training.privacy.per_layer": check_boolean,
    "training.privacy.statistics_clip": _or_none(_number(above=0)),
    "training.privacy.extra_clip": _or_none(_number(above=0)),
    "training.privacy.weight_clip": _or_none(_number(above=0)),
    "training.privacy.quantile": _or_none(_FRACTION),
    "training.privacy.clip_learning_rate": _RATE,
    "training.privacy.count_deviation": _number(above=0),
    "training.privacy.metrics": check_boolean,
    "training.example_privacy.clip": _number(above=0),
    "training.example_privacy.noise_multiplier": _RATE,
    "training.example_privacy.microbatch": _or_none(_whole()),
    "training.secure_sum.value_range": _number(above=0),
    "training.secure_sum.max_weight": _or_none(_number(above=0)),
    "training.secure_sum.bits": _whole(),
    "training.secure_sum.masks": check_boolean,
    "training.secure_sum.dropout": _number(low=0, below=1),
    # pools
    "pools.*.model": check_text,
    "pools.*.fraction": _SHARE,
    "pools.*.domain": check_text,
    "pools.*.share": _SHARE,
    "pools.*.depth": _whole(high=_MANY),
    "pools.*.cohort_size": _whole(),
    "pools.*.client_learning_rate": _RATE,
    "pools.*.server_learning_rate": _RATE,
    "pools.*.alpha": _or_none(_FRACTION),
    "pools.*.teaching.learning_rate": _RATE,
    "pools.*.teaching.decay": _FRACTION,
    "pools.*.teaching.interpolation": _FRACTION,
    "pools.*.teaching.self_teacher_temperature": _number(above=0),
    "pools.*.teaching.temperature": _number(above=0),
    "pools.*.teaching.weight": _RATE,
    "pools.*.teaching.label_interpolation": _or_none(_FRACTION),
    # parties, and clients on a graph
    "parties.networks": _networks,
    "parties.narrower": _whole(high=_MANY),
    "parties.embedding_width": _or_none(_whole(high=2**16)),
    "parties.heads": _whole(0, high=_MANY),
    "parties.projection": _or_none(_whole(high=2**16)),
    "parties.graph.name": check_text,
    "parties.graph.size": _or_none(_whole()),
    "parties.graph.probability": _or_none(_FRACTION),
    "parties.graph.seed": _or_none(_SEED),
    "parties.graph.every": _or_none(_whole()),
    # the method
    "algorithm.name": check_text,
    "algorithm.alpha": _FRACTION,
    "algorithm.alpha_schedule": check_text,
    "algorithm.skip_at_alpha_one": check_boolean,
    "algorithm.period": _whole(),
    "algorithm.steps": _whole(0),
    "algorithm.batch_size": _whole(),
    "algorithm.distillation_optimizer": check_text,
    "algorithm.distillation_epsilon": _or_none(_RATE),
    "algorithm.distillation_momentum": _or_none(_FRACTION),
    "algorithm.distillation_decay": _or_none(check_text),
    "algorithm.distillation_clip": _or_none(_number(above=0)),
    "algorithm.direction": check_text,
    "algorithm.divergence": check_text,
    "algorithm.mixup_beta": _RATE,
    "algorithm.flip": check_boolean,
    "algorithm.masked": check_boolean,
    "algorithm.scaled": check_boolean,
    "algorithm.distillation_weight": _RATE,
    "algorithm.ramp_up": _whole(0),
    "algorithm.self_distillation": check_boolean,
    "algorithm.units_per_round": _whole(0, high=2**16),
    "algorithm.learning_rate": _RATE,
    "algorithm.temperature": _number(above=0),
    "algorithm.validation.split": check_text,
    "algorithm.validation.every": _whole(),
    "algorithm.validation.patience": _whole(),
    "algorithm.validation.or_start": check_boolean,
    "algorithm.validation.drop_worst": check_boolean,
    "algorithm.sampling": check_text,
    "algorithm.samples": _whole(0, high=_MANY),
    "algorithm.with_clients": check_boolean,
    "algorithm.average_from": _whole(),
    "algorithm.average_every": _or_none(_whole()),
    "algorithm.num_models": _whole(high=_MANY),
    "algorithm.rounds_kept": _whole(high=_MANY),
    "algorithm.distilled": check_text,
    "algorithm.warm_up": _whole(0),
    "algorithm.cached": check_boolean,
    "algorithm.group_sizes": _or_none(_each(_whole())),
    "algorithm.server_model": check_text,
    "algorithm.embedding_width": _or_none(_whole(high=2**16)),
    "algorithm.diversity": _RATE,
    "algorithm.measured": _each(check_text),
    "algorithm.alignment_size": _or_none(_whole()),
    "algorithm.weights": _or_none(_each(_number())),
    "algorithm.exchanged": check_text,
    "algorithm.optimizer": check_text,
    "algorithm.epsilon": _number(above=0),
    "algorithm.output_penalty": _RATE,
    "algorithm.privacy.clip": _number(above=0),
    "algorithm.privacy.epsilon": _or_none(_number(above=0)),
    "algorithm.privacy.delta": _number(above=0, below=1),
    "algorithm.privacy.noise_multiplier": _or_none(_RATE),
    "algorithm.epochs": _whole(),
    "algorithm.digest_batch_size": _whole(),
    "algorithm.digest_epochs": _whole(0),
    "algorithm.revisit_batch_size": _whole(),
    "algorithm.revisit_epochs": _whole(0),
    "algorithm.weight": _RATE,
    "algorithm.open_size": _or_none(_whole()),
    "algorithm.aggregation": check_text,
    "algorithm.distillation_learning_rate": _RATE,
    "algorithm.distillation_epochs": _whole(),
    "algorithm.distillation_batch_size": _whole(),
    "algorithm.server": _whole(0),
    "algorithm.averaged": check_text,
    "algorithm.own_share": check_boolean,
    "algorithm.coefficients_loss": check_text,
    "algorithm.coefficients_rows": check_text,
    "algorithm.coefficients_first": check_boolean,
    "algorithm.coefficient_rate": _RATE,
    "algorithm.uniform_weight": _RATE,
    "algorithm.sharpness": _RATE,
    "algorithm.generator_noise": _whole(high=2**16),
    "algorithm.generator_hidden": _whole(high=2**20),
    "algorithm.generator_optimizer": check_text,
    "algorithm.generator_steps": _whole(),
    "algorithm.generator_batch_size": _whole(),
    "algorithm.generator_learning_rate": _RATE,
    "algorithm.generated": _or_none(_whole()),
    "algorithm.generated_weight": _RATE,
    "algorithm.diversity_weight": _RATE,
    "algorithm.weighted": check_boolean,
    "algorithm.own_weight": _FRACTION,
    "algorithm.meme_weight": _FRACTION,
    "algorithm.meme": _whole(0),
    "algorithm.student": _whole(0),
    "algorithm.student_learning_rate": _RATE,
    "algorithm.output_weight": _RATE,
    "algorithm.hidden_weight": _RATE,
    "algorithm.adaptive": check_text,
    "algorithm.kl_reduction": check_text,
    "algorithm.hidden_map": check_text,
    "algorithm.detach_targets": check_boolean,
    "algorithm.detach_normaliser": check_boolean,
    "algorithm.without_padding": check_boolean,
    "algorithm.weighting": check_text,
    "algorithm.predict_by": check_text,
    "algorithm.margin": check_text,
    "algorithm.margin_threshold": _RATE,
    "algorithm.server_learning_rate": _RATE,
    "algorithm.server_training_epochs": _whole(),
    "algorithm.server_training_batch_size": _whole(),
    "algorithm.public_batch_size": _whole(),
    "algorithm.public_epochs": _whole(),
    "algorithm.public_learning_rate": _RATE,
    "algorithm.off_diagonal": _RATE,
    "algorithm.last_weight": _RATE,
    "algorithm.first_weight": _RATE,
    "algorithm.small": _whole(0),
    "algorithm.small_width": _whole(high=2**16),
    "algorithm.shared_weight": _RATE,
    "algorithm.guided": check_text,
    "algorithm.quiz_size": _whole(),
    "algorithm.study_learning_rate": _RATE,
    "algorithm.examples": _whole(),
    "algorithm.embedding_weight": _RATE,
    "algorithm.head_weight": _RATE,
    "algorithm.teachers": _whole(0),
    "algorithm.candidates": check_text,
    "algorithm.separate_levels": check_boolean,
    "algorithm.choice": check_text,
    "algorithm.top_predictions": _or_none(_whole(high=_MANY)),
    "algorithm.embedding_distance": check_text,
    "algorithm.checkpoints_per_client": _or_none(_whole(high=_MANY)),
    "algorithm.checkpoints_on": check_text,
    "algorithm.exchange_seed": _SEED,
    "algorithm.same_start": check_boolean,
    "algorithm.updates_statistics": check_boolean,
    "algorithm.reaches_backbone": check_boolean,
    # phases before the first round
    "phases.cache": _or_none(check_text),
    "phases.stopping": check_text,
    "phases.held_out_share": _FRACTION,
    "phases.centralised_bound": check_boolean,
    "phases.evaluate_every": _whole(),
    # evaluation and execution
    "evaluation.every": _whole(),
    "evaluation.checkpoint_every": _or_none(_whole()),
    "evaluation.batch_size": _whole(),
    "evaluation.clients": _whole(),
    "evaluation.splits": _each(check_text),
    "evaluation.final_splits": _each(check_text),
    "evaluation.client_splits": _or_none(_each(check_text)),
    "evaluation.final_client_splits": _or_none(_each(check_text)),
    "evaluation.around.before": _whole(0),
    "evaluation.around.after": _whole(0),
    "execution.processes": _or_none(_whole(high=_MANY)),
    "execution.loop": check_text,
    "execution.chunk_size": _or_none(_whole()),
    "execution.seeds_loop": check_text,
    "execution.stream": check_boolean,
    "execution.precision": check_text,
    "execution.rematerialise": check_boolean,
} | {
    f"phases.{phase}.{name}": check
    for phase in ("public", "private", "centralised")
    for name, check in {
        "epochs": _whole(),
        "batch_size": _whole(),
        "patience": _whole(),
        "min_delta": _RATE,
    }.items()
}
ALLOWED |= {
    f"{group}.compression.{name}": check
    for group in ("training", "algorithm")
    for name, check in {
        "uplink": check_text,
        "downlink": check_text,
        "start": _SHARE,
        "end": _SHARE,
        "share": _SHARE,
        "bits": _whole(),
        "rows": _whole(),
        "columns": _whole(),
        "count": _whole(),
        "range_finder": _or_none(_whole()),
    }.items()
}
# The groups in which these settings are.
GROUPS = {path[:end] for path in ALLOWED for end, character in enumerate(path) if character == "."}
# Groups that may be None.
OPTIONAL_GROUPS = {
    "algorithm.compression",
    "algorithm.privacy",
    "algorithm.validation",
    "data.domains",
    "data.partition",
    "evaluation.around",
    "phases",
    "training.compression",
    "training.example_privacy",
    "training.privacy",
    "training.secure_sum",
}
