"""The FLOPs of methods, counted as forward passes of networks, without JAX.

`fedcodist.config.registry.Entry` says what these functions are called with; `work` is a
`fedcodist.report.flops.Work`.
"""

from typing import Any

LEARNING = (
    3  # forward passes per example: one, and as much for each gradient, of inputs and of parameters
)

# Methods of clients: the cost of learning from one example.


def learning(work: Any, pool: str) -> float:
    """FedAvg, and methods that compute next to nothing besides the network."""
    return LEARNING * work.trained[pool]


def with_teacher(work: Any, pool: str) -> float:
    """FedGKD's and FedNTD's: a teacher answers every example."""
    return (LEARNING + 1) * work.trained[pool]


def moon(work: Any, pool: str) -> float:
    """The received model and the client's previous one answer every example."""
    return (LEARNING + 2) * work.trained[pool]


def scaffold(work: Any, pool: str) -> float:
    """Option 1 takes the gradient of all examples once more."""
    training = work.config["training"]
    more = 1 / training["epochs"] if training["scaffold_option"] == 1 else 0
    return LEARNING * work.trained[pool] * (1 + more)


def fed_dropout(work: Any, pool: str) -> float:
    """Clients have a share of the network's units."""
    model = work.config["pools"][pool]["model"]
    share = work.config["training"]["fed_dropout"]["share"]
    return LEARNING * work.network(f"pools.{pool}.model", model, share)


def fed_kd(work: Any, pool: str) -> float:
    """Teacher and student learn; the maps between their hidden states are left out."""
    teacher = work.network("training.fed_kd.teacher", work.config["training"]["fed_kd"]["teacher"])
    return LEARNING * (teacher + work.forward[pool])


# Servers of pools: their FLOPs in a run.


def nothing(work: Any) -> float:
    """Averages are not counted."""
    return 0.0


def fjord(work: Any) -> Any:
    """In every step a client's own network or one within it is drawn, each as likely, and learns.

    With distillation the client's own network learns beside it, else in its place.
    """

    def besides(pool):
        own = work.forward[pool]
        within = [cost for cost in work.forward.values() if cost <= own]
        drawn = sum(within) / len(within)
        return LEARNING * (drawn if work.settings.get("self_distillation", True) else drawn - own)

    return work.besides_learning(besides)


def periodic_codistillation(work: Any) -> float:
    return _codistillation(work, work.rounds // work.settings["period"])


def merged_codistillation(work: Any) -> float:
    settings, times = work.settings, work.rounds
    if settings["skip_at_alpha_one"] and settings["alpha_schedule"] != "linear_to_zero":
        of_pools = [pool["alpha"] for pool in work.config["pools"].values()]
        if all(alpha == 1 or (alpha is None and settings["alpha"] == 1) for alpha in of_pools):
            times = 0
    return _codistillation(work, times)


def _codistillation(work: Any, times: int) -> float:
    """On every batch each model answers once, as teacher and self-teacher, and learns as a student."""
    examples = times * work.images * work.unlabelled_size
    return examples * (1 + LEARNING) * sum(work.forward.values())


def fed_df(work: Any) -> float:
    """All models of the cohort are teachers, also those that drop-worst leaves out."""
    settings, models = work.settings, sum(work.forward.values())
    pools = work.config["pools"]
    teachers = sum(pools[pool]["cohort_size"] * cost for pool, cost in work.forward.items())
    steps = settings["steps"] if work.steps is None else work.steps
    total = steps * settings["batch_size"] * (teachers + LEARNING * models)
    if (validation := settings.get("validation")) is not None:
        looks = steps / validation.get("every", 100) + bool(validation.get("or_start"))
        examples = work.data.splits[validation["split"]].num_examples
        total += examples * (looks * models + bool(validation.get("drop_worst")) * teachers)
    return work.rounds * total


def fed_be(work: Any) -> float:
    """Teachers answer every unlabelled image once a round; new statistics of the mean are left out."""
    settings, pools = work.settings, work.config["pools"]
    teachers = sum(
        cost * (1 + settings["samples"] + settings["with_clients"] * pools[pool]["cohort_size"])
        for pool, cost in work.forward.items()
    )
    learned = LEARNING * work.images * sum(work.forward.values())
    return work.rounds * (teachers * work.answered + learned)


def fed_sdd(work: Any) -> float:
    """In every round after the warm-up, all models stored so far are teachers."""
    settings, (model,) = work.settings, work.forward.values()
    if not settings["steps"]:
        return 0.0
    taught = work.answered if settings["cached"] else work.images
    students = settings["num_models"] if settings["distilled"] == "all" else 1
    teachers = [
        settings["num_models"] * min(round + 1, settings["rounds_kept"])
        for round in range(settings["warm_up"], work.rounds)
    ]
    return model * sum(taught * count + work.images * students * LEARNING for count in teachers)


# Parties and clients on a graph: the run's Flops.


def alone(work: Any) -> Any:
    """They learn from their examples."""
    return work.of_parties()


def fed_md(work: Any) -> Any:
    """Public images are answered, then learned from."""
    answered = work.rounds * work.public_images("alignment_size")
    return work.of_parties(answered, work.settings["digest_epochs"] * answered)


def fd(work: Any) -> Any:
    """Private images are answered once a round."""
    return work.of_parties(per_example=LEARNING + 1 / work.settings["epochs"])


def ds_fl(work: Any) -> Any:
    """As FedMD's; the server learns too."""
    answered = work.rounds * work.public_images("open_size")
    learned = work.settings["distillation_epochs"] * answered
    server = LEARNING * learned * work.network_of_party("server")
    return work.of_parties(answered, learned, server=server)


def fml(work: Any) -> Any:
    """The meme learns from every private example too."""
    meme = work.network_of_party("meme")
    return work.of_parties(besides=lambda party: LEARNING * meme * work.examples[party])


def multi_headed(work: Any) -> Any:
    """Counts as if all neighbours were teachers equally often."""
    settings = work.settings
    public = work.rounds * work.config["training"]["steps"] * settings["public_batch_size"]
    teachers = lambda party: public * settings["teachers"] * work.mean_of_neighbours(party)
    return work.of_parties(learned=public, besides=teachers)


def decentralised_periodic(work: Any) -> Any:
    """Each client answers and learns from public images every period."""
    public = work.rounds // work.settings["period"] * work.settings["examples"]
    return work.of_parties(public, public)
