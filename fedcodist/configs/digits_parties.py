r"""Methods of parties who each own a model, on scikit-learn's handwritten digits; no download.

A run is a method's name. All methods have the parties, public digits and private images of
digits_fed_md.py and start from the same transfer learning. In a round, all train equally long on
private images. They differ in what is exchanged: logits (FedMD, FCCL), mean logits of each label (FD),
probabilities (DS-FL, KT-pFL), a shared model (FML, FedKD, FedMRL), heads (LG-FedAvg; FedGen, which also
sends a generator of embeddings), mean embeddings of each label (FedProto, FedGH, FedTGP), gradients of
a vector per label (FedL2G), or nothing (local_only).

The shared models of FML, FedKD and FedMRL and the model of DS-FL's server belong to no party and start
untrained. The server only sees public digits, so it is hardly ever right about private classes. FedMD
and local_only keep the optimizer and the output penalty of private training, and FedKD keeps its
optimizers over rounds. The others start a new optimizer in each round. Only FedMD and local_only have a
penalty, as in the sources. Methods with shared heads or embeddings of one width need networks with one
more linear layer. Costs are those of the rounds, without the training before them.

    fedcodist compare digits_parties
"""

from ml_collections import ConfigDict, config_dict

from fedcodist.config import defaults
from fedcodist.configs import digits_fed_md

# Each method's own settings.
METHODS = {
    "local_only": dict(),
    "fed_md": None,  # digits_fed_md.py has them
    "fd": dict(weight=1.0, temperature=1.0),
    "ds_fl": dict(
        open_size=200,  # the number of public images takes all
        aggregation="era",  # or "sa", the mean itself
        temperature=0.1,
        distillation_learning_rate=1e-3,
        distillation_epochs=1,
        distillation_batch_size=64,
        server=1,  # the server has party 1's network
    ),
    "fml": dict(own_weight=0.5, meme_weight=0.5, meme=1),  # the meme has party 1's network
    "fed_kd_parties": dict(
        student=1,  # the student has party 1's network
        student_learning_rate=1e-3,
        output_weight=1.0,
        hidden_weight=0.0,  # these networks return no hidden states
        detach_normaliser=True,  # otherwise labels may be unlearned: see MutualLosses
    ),
    "fed_proto": dict(weight=1.0, weighting="examples", predict_by="head"),
    "fed_gh": dict(
        server_learning_rate=1e-3,
        server_training_epochs=1,
        server_training_batch_size=1,
        predict_by="own_head",
    ),
    "fed_tgp": dict(
        weight=10.0,
        server_learning_rate=1e-3,
        server_training_epochs=100,
        server_training_batch_size=10,
        margin="largest",
        margin_threshold=100.0,
        predict_by="head",
    ),
    "kt_pfl": dict(
        open_size=200,
        temperature=10.0,
        coefficient_rate=0.1,
        uniform_weight=0.7,
        distillation_learning_rate=1e-3,
        distillation_epochs=1,
        distillation_batch_size=64,
    ),
    "lg_fed_avg": dict(weighted=True),  # heads count by parties' numbers of examples
    "fed_gen": dict(
        weighted=False,
        warm_up=0,
        generator_noise=32,
        generator_hidden=64,
        generator_steps=50,
        generator_batch_size=32,
        generator_learning_rate=3e-4,
        generated=None,  # as many embeddings as a batch has examples
        generated_weight=1.0,
        diversity_weight=1.0,
    ),
    "fccl": dict(
        public_batch_size=64,
        public_epochs=1,
        public_learning_rate=1e-3,
        off_diagonal=0.0051,
        last_weight=1.0,
        first_weight=1.0,
    ),
    "fed_mrl": dict(
        small=2,  # the shared model has party 2's network
        small_width=8,  # of its embedding
        own_weight=1.0,
        shared_weight=1.0,
        weighted=True,
    ),
    "fed_l2g": dict(
        guided="embeddings",  # or "logits"
        quiz_size=3,  # examples held out by a party
        warm_up=3,  # rounds
        weight=1.0,
        study_learning_rate=0.01,
        server_learning_rate=1.0,
    ),
}
# These methods need networks with an embedding and a linear head.
HEADS = {"lg_fed_avg", "fed_gen", "fed_proto", "fed_gh", "fed_tgp", "fed_mrl", "fed_l2g"}
EMBEDDING_WIDTH = 32


def get_runs() -> list[str]:
    """Every method; local_only, without collaboration, comes first."""
    return list(METHODS)


def get_config(run: str = "fed_md") -> ConfigDict:
    """Returns one method's experiment."""
    defaults.check_run(run, get_runs())
    config = digits_fed_md.get_config()
    config.name = "digits_parties"
    config.run = run
    config.full_rounds = config.rounds
    config.seeds = 3
    settings = METHODS[run]
    if settings is not None:
        common = config.algorithm
        with config.unlocked():
            config.algorithm = dict(
                name=run,
                learning_rate=common.learning_rate,
                epsilon=common.epsilon,
                output_penalty=common.output_penalty,  # of transfer learning, and of `local_only`
                epochs=common.revisit_epochs,
                batch_size=common.revisit_batch_size,
                **settings,
            )
    with config.unlocked():
        config.parties.embedding_width = config_dict.placeholder(int)
    if run in HEADS:
        config.parties.embedding_width = EMBEDDING_WIDTH
    config.phases.centralised_bound = False
    config.phases.cache = "data/pretraining"
    return config
