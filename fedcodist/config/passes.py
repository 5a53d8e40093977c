"""The FLOPs of methods, counted as forward passes of networks, without JAX.

`fedcodist.config.registry.Entry` says what these functions are called with; `work` is a
`fedcodist.report.work.Work`.
"""

from typing import Any

LEARNING = (
    3  # forward passes per example: one, and the cost of one for each gradient (inputs, parameters)
)

# Methods of clients: the cost of learning from one example.


def learning(work: Any, pool: str) -> float:
    """FedAvg, and methods whose computation outside the network costs next to nothing."""
    return LEARNING * work.forward_in_training[pool]


def with_teacher(work: Any, pool: str) -> float:
    """FedGKD's and FedNTD's: a teacher predicts every example."""
    return (LEARNING + 1) * work.forward_in_training[pool]


def moon(work: Any, pool: str) -> float:
    """The received model and the client's previous one predict every example."""
    return (LEARNING + 2) * work.forward_in_training[pool]


def scaffold(work: Any, pool: str) -> float:
    """Option 1 takes the gradient of all examples once more."""
    training = work.config["training"]
    more = 1 / training["epochs"] if training["scaffold_option"] == 1 else 0
    return LEARNING * work.forward_in_training[pool] * (1 + more)


def fed_rep(work: Any, pool: str) -> float:
    """While the head learns, the body runs forward; the head's own gradients cost next to nothing."""
    training = work.config["training"]
    head, body = training.get("fed_rep", {}).get("head_epochs", 10), training["epochs"]
    return work.forward_in_training[pool] * (head + LEARNING * body) / (head + body)


def apfl(work: Any, pool: str) -> float:
    """The global model and the mixture learn from each example."""
    return 2 * LEARNING * work.forward_in_training[pool]


def p_fed_me(work: Any, pool: str) -> float:
    """Each batch is learned from in every step of the personal model."""
    settings = work.config["training"].get("p_fed_me", {})
    return settings.get("personal_steps", 5) * LEARNING * work.forward_in_training[pool]


def per_fed_avg(work: Any, pool: str) -> float:
    """Without a Hessian each example is in one gradient of a step; with it, a third of them is in two.

    Once a round, one more gradient of all examples adapts the model to the client.
    """
    training = work.config["training"]
    has_hessian = training.get("per_fed_avg", {}).get("variant") == "hessian_free"
    gradients = (4 / 3 if has_hessian else 1) + 1 / training["epochs"]
    return gradients * LEARNING * work.forward_in_training[pool]


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
    """In every step a client draws its own network or one within it, all as likely, and trains it.

    With self-distillation the client's own network is trained in the same step too.
    """

    def other_flops(pool: str) -> float:
        own = work.forward[pool]
        # Levels of one width are one network to draw.
        within = {cost for cost in work.forward.values() if cost <= own}
        drawn = sum(within) / len(within)
        return LEARNING * (drawn if work.settings.get("self_distillation", True) else drawn - own)

    return work.additional_flops(other_flops)


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
    """On every batch each model predicts once, as teacher and self-teacher, and learns as a student."""
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
    """Teachers predict every unlabelled image once a round; new statistics of the mean are left out."""
    settings, pools = work.settings, work.config["pools"]
    teachers = sum(
        cost * (1 + settings["samples"] + settings["with_clients"] * pools[pool]["cohort_size"])
        for pool, cost in work.forward.items()
    )
    learned = LEARNING * work.images * sum(work.forward.values())
    return work.rounds * (teachers * work.predicted + learned)


def fed_et(work: Any) -> float:
    """All models of the cohorts predict, and the large one learns; layers of one width are left out."""
    pools, settings = work.config["pools"], work.settings
    teachers = sum(pools[pool]["cohort_size"] * cost for pool, cost in work.forward.items())
    large = work.network("algorithm.server_model", settings["server_model"])
    return work.rounds * work.images * (teachers + LEARNING * large)


def fed_sdd_pools(work: Any) -> float:
    """After the warm-up, the models that all pools have stored so far teach in every pool.

    FedSDD itself has one pool.
    """
    settings = work.settings
    if not settings["steps"]:
        return 0.0
    taught = work.predicted if settings["cached"] else work.images
    students = settings["num_models"] if settings["distilled"] == "all" else 1
    teachers = [
        settings["num_models"] * min(round + 1, settings["rounds_kept"])
        for round in range(settings["warm_up"], work.rounds)
    ]
    of_a_model = sum(taught * count + work.images * students * LEARNING for count in teachers)
    return of_a_model * sum(work.forward.values())


# Parties and clients on a graph: the run's Flops.


def alone(work: Any) -> Any:
    """They learn from their examples."""
    return work.of_parties()


def fed_md(work: Any) -> Any:
    """Models predict the public images, then learn from them."""
    predicted = work.rounds * work.public_images("alignment_size")
    return work.of_parties(predicted, work.settings["digest_epochs"] * predicted)


def fd(work: Any) -> Any:
    """Models predict private images once a round, unless the predictions of training are used."""
    if work.settings.get("averaged") == "in_training":
        return work.of_parties()
    return work.of_parties(per_example=LEARNING + 1 / work.settings["epochs"])


def ds_fl(work: Any) -> Any:
    """As FedMD; the server learns too."""
    predicted = work.rounds * work.public_images("open_size")
    learned = work.settings["distillation_epochs"] * predicted
    server = LEARNING * learned * work.network_of_party("server")
    return work.of_parties(predicted, learned, server=server)


def kt_pfl(work: Any) -> Any:
    """As FedMD; the server's coefficients are left out."""
    predicted = work.rounds * work.public_images("open_size")
    return work.of_parties(predicted, work.settings["distillation_epochs"] * predicted)


def fml(work: Any) -> Any:
    """The meme learns from every private example too."""
    meme = work.network_of_party("meme")
    return work.of_parties(other_flops=lambda party: LEARNING * meme * work.examples[party])


def fed_kd_parties(work: Any) -> Any:
    """The student learns from every private example too; the maps of hidden states are left out."""
    student = work.network_of_party("student")
    return work.of_parties(other_flops=lambda party: LEARNING * student * work.examples[party])


def fed_proto(work: Any) -> Any:
    """Models predict private images once a round; distances to prototypes are left out."""
    return work.of_parties(per_example=LEARNING + 1 / work.settings["epochs"])


def fed_gh(work: Any) -> Any:
    """As FedProto; the server's head learns from all parties' prototypes."""
    width, classes = work.head_shape
    seen = work.rounds * _server_epochs(work, 1) * work.prototypes
    server = LEARNING * 2 * width * classes * seen
    return work.of_parties(per_example=LEARNING + 1 / work.settings["epochs"], server=server)


def fed_tgp(work: Any) -> Any:
    """As FedProto; on every batch the server's two layers make prototypes of all classes."""
    width, classes = work.head_shape
    size = work.settings.get("server_training_batch_size", work.settings["batch_size"])
    steps = work.rounds * _server_epochs(work, 100) * -(-work.prototypes // size)
    server = LEARNING * 2 * 2 * width**2 * classes * steps
    return work.of_parties(per_example=LEARNING + 1 / work.settings["epochs"], server=server)


def _server_epochs(work: Any, default: int) -> int:
    """The server's epochs over prototypes in a round, which default to the parties' epochs."""
    settings = work.settings
    return settings.get("server_training_epochs", settings.get("epochs", default))


def fed_gen(work: Any) -> Any:
    """Besides private examples, heads learn from generated embeddings, and the generator learns."""
    settings, classes = work.settings, work.num_classes
    width, _ = work.head_shape
    # The defaults are those of `Generator`.
    noise, hidden = settings.get("generator_noise", 32), settings.get("generator_hidden", 256)
    generator, head = 2 * ((noise + classes) * hidden + hidden * width), 2 * width * classes
    # A step has as many embeddings as examples, or `generated`. A head that learns needs no gradient
    # with respect to embeddings, and a head that teaches none with respect to parameters.
    share = (settings.get("generated") or settings["batch_size"]) / settings["batch_size"]
    learned = lambda party: share * work.examples[party] * (generator + 2 * head)
    steps = settings.get("generator_steps", settings.get("steps", 50))
    made = steps * settings.get("generator_batch_size", settings["batch_size"])
    server = work.rounds * made * (LEARNING * generator + 2 * head)
    return work.of_parties(other_flops=learned, server=server)


def fccl(work: Any) -> Any:
    """As FedMD on public images; two teachers predict every private example."""
    settings = work.settings
    size = settings["public_batch_size"]
    steps = settings["public_epochs"] * (work.num_public // size)
    public = work.rounds * steps * size
    return work.of_parties(public, public, per_example=LEARNING + 2)


def fed_mrl(work: Any) -> Any:
    """The small model learns from every private example too; projectors are left out."""
    small = work.network_of_party("small", work.settings["small_width"])
    return work.of_parties(other_flops=lambda party: LEARNING * small * work.examples[party])


def fed_l2g(work: Any) -> Any:
    """A round's tried step differentiates the study batch twice, and the quiz set once."""
    settings = work.settings
    tried = 2 * settings["batch_size"] + settings["quiz_size"]
    return work.of_parties(learned=work.rounds * tried)


def multi_headed(work: Any) -> Any:
    """Counts as if all neighbours were teachers equally often."""
    settings = work.settings
    batch_size = settings.get("distillation_batch_size") or settings["public_batch_size"]
    public = work.rounds * work.config["training"]["steps"] * batch_size
    teachers = lambda party: public * settings["teachers"] * work.mean_of_neighbours(party)
    return work.of_parties(learned=public, other_flops=teachers)


def decentralised_periodic(work: Any) -> Any:
    """Each client predicts the public images, and learns from them, once a period."""
    settings = work.settings
    public = work.rounds // settings["period"] * settings["examples"]
    epochs = settings.get("distillation_epochs", settings.get("epochs", 1))
    return work.of_parties(public, epochs * public)
