"""Default settings, group by group; a config states only what differs from them.

A setting without a value is a placeholder of its type, so that the command line can set it.
"""

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

TEACHING = dict(
    learning_rate=1e-3,
    decay=0.1,
    interpolation=0.05,
    self_teacher_temperature=1.0,
    temperature=1.0,
    weight=1.0,
)


def check_run(run: str, runs: Sequence[str]) -> None:
    """Raises ValueError that lists the config's runs, unless `run` is one of them."""
    if run not in runs:
        raise ValueError(f"a run of this config is one of {list(runs)}, got {run!r}.")


def experiment(name: str, rounds: int, run: str | None = None, seeds: int = 1) -> ConfigDict:
    """A config without groups of settings.

    With several runs it has `full_rounds`: the rounds after which a run's result belongs in a table.
    """
    config = ConfigDict(dict(name=name, rounds=rounds, seed=0, seeds=seeds))
    if run is not None:
        config.run, config.full_rounds = run, rounds
    return config


def training(**differs: Any) -> dict[str, Any]:
    """Clients train by SGD, and the server takes their mean."""
    settings: dict[str, Any] = dict(
        client_optimizer="sgd",
        batch_size=20,
        epochs=1,
        server_optimizer="sgd",  # of rate 1: the mean of the clients' models
        server_epsilon=config_dict.placeholder(float),
        server_schedule="constant",
    )
    return settings | differs


def adaptive_training(**differs: Any) -> dict[str, Any]:
    """The server has Adam, whose rate falls to zero, as in the codistillation paper."""
    server = dict(server_optimizer="adam", server_epsilon=1e-5, server_schedule="linear_decay")
    return training(**server) | differs


def one_pool(model: str, cohort_size: int, client_learning_rate: float) -> dict[str, Any]:
    """All clients train one network."""
    pool = dict(model=model, fraction=1.0, cohort_size=cohort_size)
    rates = dict(client_learning_rate=client_learning_rate, server_learning_rate=1.0)
    return dict(main=pool | rates)


def codistilled_pool(model: str, teaching: dict[str, Any] | None = None, **differs: Any) -> dict:
    """A pool whose model teaches and learns; `teaching` holds what differs from TEACHING."""
    settings: dict[str, Any] = dict(
        model=model,
        cohort_size=20,
        client_learning_rate=0.1,
        server_learning_rate=0.01,
        alpha=config_dict.placeholder(float),  # in place of algorithm.alpha
        teaching=TEACHING
        | dict(label_interpolation=config_dict.placeholder(float))  # for labelled distillation data
        | (teaching or {}),
    )
    return settings | differs


def codistillation(method: str, **differs: Any) -> dict[str, Any]:
    """`algorithm` of FedAvg and both codistillations, so that runs differ in the method alone."""
    settings: dict[str, Any] = dict(
        name=method,
        alpha=0.7,  # merged
        alpha_schedule="constant",  # or "linear_to_one", "linear_to_zero"
        skip_at_alpha_one=False,
        period=200,  # periodic
        steps=200 if method == "periodic_codistillation" else 32,
        batch_size=64,
        distillation_optimizer="adam",
        distillation_epsilon=1e-5,
        divergence="kl",  # or "jensen_shannon", "mean_squared_logits", "my_module:function"
        direction="forward",  # KL(teacher || student)
        mixup_beta=2.0,
        flip=False,
    )
    return settings | differs


def distillation(method: str, **differs: Any) -> dict[str, Any]:
    """`algorithm` of servers that distil an ensemble: FedDF, FedBE, FedSDD, Fed-ET."""
    of_method: dict[str, Any] = {}
    if method in ("fed_sdd", "fed_sdd_pools"):
        of_method = dict(
            num_models=4,
            rounds_kept=1,
            distilled="main",  # or "all"
            warm_up=0,  # rounds
            cached=False,
        )
    if method == "fed_sdd":
        of_method |= dict(
            group_sizes=config_dict.placeholder(tuple),  # nearly equal ones where not set
            measured=(),
        )
    return (
        dict(
            name=method,
            steps=50,
            batch_size=64,
            distillation_optimizer="sgd",
            distillation_epsilon=config_dict.placeholder(float),
            divergence="kl",  # or "jensen_shannon", "mean_squared_logits", "my_module:function"
            direction="forward",
            learning_rate=0.1,
            temperature=4.0,
            scaled=True,  # by the temperature squared
            mixup_beta=0.0,
            flip=False,
        )
        | of_method
        | differs
    )


def fed_kd(teacher: str, teacher_learning_rate: float, **differs: Any) -> dict[str, Any]:
    """`training.fed_kd`; for networks of images a config adds the layers to align."""
    settings: dict[str, Any] = dict(
        teacher=teacher,
        teacher_learning_rate=teacher_learning_rate,
        output_weight=1.0,
        hidden_weight=1.0,
        exchange="epoch_delta",
        fresh_optimizers=False,
        adaptive="batch",
        kl_reduction="batchmean",
        hidden_map="learned",
        detach_targets=True,
        detach_normaliser=False,
        without_padding=False,  # of text, in distances of hidden states
    )
    return settings | differs


def compression(**differs: Any) -> dict[str, Any]:
    """`training.compression`, as FedKD compresses its links."""
    settings: dict[str, Any] = dict(
        uplink="svd",
        downlink="svd",
        start=0.95,
        end=0.98,
        range_finder=config_dict.placeholder(int),  # columns; exact where not set
        spectra=False,  # of clients' updates, in metrics.jsonl
        gradient_spectra=False,  # of a batch's gradient, before any optimizer
    )
    return settings | differs


def privacy(**differs: Any) -> dict[str, Any]:
    """`training.privacy`: clients' updates are clipped, and sums are noised to fit a budget."""
    settings: dict[str, Any] = dict(
        clip=1.0,  # of an update's norm
        epsilon=config_dict.placeholder(float),  # the budget; training ends where it is spent
        delta=1e-5,
        noise_multiplier=config_dict.placeholder(float),  # chosen to fit the budget, if not set
        noise="independent",  # or "banded": correlated over rounds
        bands=config_dict.placeholder(int),  # a client is drawn at most once in so many rounds
        sampling="poisson",  # or "fixed": cohorts of one size, without replacement
        most=config_dict.placeholder(int),  # clients in a Poisson cohort; chosen if not set
        accountant=config_dict.placeholder(
            str
        ),  # "pld" or "rdp"; chosen for the sampling if not set
        per_layer=False,
        statistics_clip=config_dict.placeholder(float),  # for batch statistics
        extra_clip=config_dict.placeholder(float),  # for a method's additional messages
        weight_clip=config_dict.placeholder(float),  # all weights are 1 if not set
        quantile=config_dict.placeholder(float),  # of the norms, which the clip follows if set
        clip_learning_rate=0.2,
        count_deviation=10.0,
        metrics=True,  # of training, which are outside of the guarantee
    )
    return settings | differs


def party_privacy(**differs: Any) -> dict[str, Any]:
    """`algorithm.privacy` of FedMD, DS-FL, FD and FedProto: parties clip what they send."""
    settings: dict[str, Any] = dict(
        clip=1.0,  # of the norm of an example's scores, or of a class's mean
        epsilon=config_dict.placeholder(float),  # the budget; training ends where it is spent
        delta=1e-5,
        noise_multiplier=config_dict.placeholder(float),  # chosen to fit the budget, if not set
    )
    return settings | differs


def secure_sum(value_range: float, **differs: Any) -> dict[str, Any]:
    """`training.secure_sum`; `value_range` bounds every coordinate that a client sends."""
    settings: dict[str, Any] = dict(
        value_range=value_range,
        max_weight=config_dict.placeholder(float),  # the largest client's examples where not set
        bits=32,
        masks=True,
        dropout=0.0,  # the probability that a client drops out before its vector arrives
    )
    return settings | differs


def fed_md(**differs: Any) -> dict[str, Any]:
    """`algorithm` of FedMD, as the released code has it for CIFAR."""
    settings: dict[str, Any] = dict(
        name="fed_md",
        alignment_size=5000,  # of all public images; their number takes all
        exchanged="logits",  # or "probabilities", at the temperature
        temperature=1.0,
        learning_rate=1e-3,
        epsilon=1e-7,  # Keras's default; Keras adds it before the bias correction, not after
        digest_epochs=1,
        digest_batch_size=128,
        revisit_epochs=4,
        revisit_batch_size=5,
        output_penalty=1e-3,
        weights=config_dict.placeholder(tuple),  # one per party; equal ones if not set
    )
    return settings | differs


def phases(**differs: Any) -> dict[str, Any]:
    """`phases`: the training before FedMD's first round, and its upper bound."""
    settings: dict[str, Any] = dict(
        stopping="held_out",  # "test_data" as in the released code; "fixed" for all epochs
        held_out_share=0.1,  # of the public training data
        evaluate_every=1,  # epochs
        public=dict(epochs=20, batch_size=128, patience=3, min_delta=0.005),
        private=dict(epochs=25, batch_size=32, patience=10, min_delta=0.001),
        centralised=dict(epochs=50, batch_size=32, patience=10, min_delta=0.001),
        centralised_bound=True,
        cache=config_dict.placeholder(str),  # a folder that stores trained models for other runs
    )
    return settings | differs


def evaluation(every: int, checkpoint_every: int, **differs: Any) -> dict[str, Any]:
    """`evaluation`; final splits are evaluated after the last round only."""
    settings: dict[str, Any] = dict(
        every=every,
        batch_size=500,
        checkpoint_every=checkpoint_every,
        splits=("held_out",),
        final_splits=("test",),
    )
    return settings | differs


def execution(**differs: Any) -> dict[str, Any]:
    """`execution`: a process for each core, and clients one after another."""
    return (
        plain_execution(
            chunk_size=config_dict.placeholder(int),  # with loop="vmap" what fits, if not set
            precision="float32",  # or "bfloat16"
            rematerialise=False,
        )
        | differs
    )


def plain_execution(**differs: Any) -> dict[str, Any]:
    """`execution` for parties and clients on a graph, who have networks of their own."""
    settings: dict[str, Any] = dict(
        processes=config_dict.placeholder(int),
        loop="scan",
        chunk_size=1,
        seeds_loop="map",
        stream=False,
    )
    return settings | differs
