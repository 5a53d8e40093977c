"""What methods compute, as forward passes of networks: the arithmetic of their FLOPs, without JAX.

A registry's `Entry` says what a function here is called with; `work` is `fedcodist.report.flops.Work`.
"""

from typing import Any

LEARNING = 3  # forward passes that a step costs per example: one, and the gradients of two kinds

# Of clients: what learning from an example costs.


def learning(work: Any, pool: str) -> float:
    """FedAvg's, and of what differs from it in how little is computed besides the network."""
    return LEARNING * work.trained[pool]


def fed_gkd(work: Any, pool: str) -> float:
    """The teacher answers every example."""
    return (LEARNING + 1) * work.trained[pool]


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


# Of servers of pools: what they do in a run.


def nothing(work: Any) -> float:
    """Averages are not counted."""
    return 0.0


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
    """Each model's start, teacher and self-teacher at once, and each student on every batch."""
    examples = times * work.images * work.unlabelled_size
    return examples * (1 + LEARNING) * sum(work.forward.values())


def fed_df(work: Any) -> float:
    """All the cohort's models as teachers, those too that drop-worst leaves out."""
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
    """Every unlabelled image is answered once a round; statistics of a mean of students are left out."""
    settings, pools = work.settings, work.config["pools"]
    teachers = sum(
        cost * (1 + settings["samples"] + settings["with_clients"] * pools[pool]["cohort_size"])
        for pool, cost in work.forward.items()
    )
    learned = LEARNING * work.images * sum(work.forward.values())
    return work.rounds * (teachers * work.answered + learned)


def fed_sdd(work: Any) -> float:
    """In every round after the warm-up a teacher of all models that are kept by then."""
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


# Of parties and clients on a graph: the run's Flops.


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
    """Teachers are taken to be all neighbours equally often."""
    settings = work.settings
    public = work.rounds * work.config["training"]["steps"] * settings["public_batch_size"]
    teachers = lambda party: public * settings["teachers"] * work.mean_of_neighbours(party)
    return work.of_parties(learned=public, besides=teachers)


def decentralised_periodic(work: Any) -> Any:
    """Each client answers and learns from public images every period."""
    public = work.rounds // work.settings["period"] * work.settings["examples"]
    return work.of_parties(public, public)
