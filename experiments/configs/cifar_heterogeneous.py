r"""HtFLlib's comparison of methods for clients with different networks: CIFAR-10 and CIFAR-100.

    python -m fedcodist.commands.compare --config experiments/configs/cifar_heterogeneous.py \
        --workdir runs/cifar_heterogeneous --only "cifar100,dirichlet,*,scaled"

A run is "data,split,method", and may end in ",scaled". The data folders are data/cifar10 of
`fedcodist prepare cifar10`, and data/cifar100_whole, whose command is in datasets/cifar100/README.md.

The protocol is that of https://arxiv.org/abs/2506.03954 and of its code at commit e959261
(`system/total.sh`). All of 20 clients take part in every round. They have the eight networks of
HtFE-img-8 in turn, with embeddings of 512. Batches have 10 images, a round has one epoch, SGD has the
rate 0.01, and there are three seeds. Training and test images are dealt together, as PFLlib's `dataset/`
does, with concentration 0.1 or with 2 labels (CIFAR-10) or 10 labels (CIFAR-100) per client. A quarter
of each client's images are its test images. Pixels are normalised by mean and deviation 0.5, without
augmentation.

These are the differences. In PFLlib's Dirichlet division, a client that has reached the mean size gets
no images of further labels. Here, and in all recorded runs, there is no such limit
(`data.partition.balanced` is left out), so clients' sizes differ more. The test share is rounded, and
there rounded up. HtFLlib leaves out the last, smaller batch of an epoch, always visits images in one
order, stops 100 rounds after the best one, and reports this round, the best by test accuracy. Here every
image is visited, in a new order in each epoch, and test images are evaluated after the last round only.
HtFLlib's pathological split deals labels to clients in their order and in unequal parts. The number of
rounds is our choice, since HtFLlib's limit of 2,000 is hardly ever reached.

Methods differ too. In HtFLlib's FML and FedKD the KL divergence is also a mean over the labels, so it is
10 or 100 times weaker than here, a model's gradient is that of both models' losses, and gradients are
clipped at a norm of 10. Those of FedL2G are clipped at 100. Here nothing is clipped. Here FedProto and
FedTGP predict with their heads, and there by the nearest prototype. Here FedGH is evaluated with a
party's own head, and there with the server's. FD's loss is a divergence here, and there a cross-entropy
with the mean logits as target. FedMRL's mean is weighted by numbers of examples here, and there it is
not, and its projectors' training is lost.

Scaled runs are for two cores: 4,000 images in all, four networks of up to 1.2 million parameters, 40
rounds. By then, training alone has fitted most clients' images. A run of three seeds takes 4 to
14 minutes on one core, and those of FedKD, FedGen and FedTGP up to 20, 33 and 40. Accuracies are far
below the paper's, so only differences between methods can be compared. Methods have the settings of
digits_heterogeneous. They are other ones than HtFLlib's for FedProto, FedGen, FedMRL and FedL2G: see
HTFLLIB. docs/results/heterogeneous.md lists the runs.
"""

from typing import Any

from ml_collections import ConfigDict

from fedcodist.config import defaults
from fedcodist.configs import digits_heterogeneous

# Data -> the folder, and labels per client of the pathological split.
DATA = {"cifar10": ("data/cifar10", 2), "cifar100": ("data/cifar100_whole", 10)}
SPLITS = ("dirichlet", "pathological")
# HtFLlib's settings where they differ from those of digits_heterogeneous; FedL2G's are its defaults.
HTFLLIB: dict[str, dict[str, Any]] = {
    "fed_proto": dict(weight=10.0),
    "fed_gen": dict(generator_hidden=512, generator_steps=100, generator_learning_rate=0.1),
    "fed_mrl": dict(small_width=128),
    "fed_l2g": dict(warm_up=50, quiz_size=10),
}


def get_runs() -> list[str]:
    """Scaled runs first."""
    runs = [
        f"{data},{split},{method}"
        for data in DATA
        for split in SPLITS
        for method in digits_heterogeneous.get_runs()
    ]
    return [*(f"{run},scaled" for run in runs), *runs]


def get_config(run: str = "cifar100,dirichlet,fd,scaled") -> ConfigDict:
    """Returns one run."""
    defaults.check_run(run, get_runs())
    data, split, method, *scaled = run.split(",")
    folder, labels_per_client = DATA[data]
    config = defaults.experiment("cifar_heterogeneous", 40 if scaled else 1000, run, seeds=3)
    division: dict[str, Any] = dict(concentration=0.1)
    if split == "pathological":
        division = dict(labels_per_client=labels_per_client)
    config.data = dict(
        name="prepared",
        folder=folder,
        unlabelled_folder=folder,  # not used by any of the methods
        num_unlabelled=1,
        partition=dict(name=split, num_clients=20, all_splits=True, **division),
        client_test_share=0.25,
        crop=32,
        padding=0,
        augmentation="none",
        mean=(0.5, 0.5, 0.5),
        deviation=(0.5, 0.5, 0.5),
        seed=0,
    )
    if scaled:
        config.data.partition.examples = 4000
    config.parties = dict(
        networks="htfl_small" if scaled else "htfe_img_8", narrower=1, embedding_width=512
    )
    config.algorithm = digits_heterogeneous.algorithm(method)
    if not scaled:
        config.algorithm.update(HTFLLIB.get(method, {}))
    # Clients hold all images, so nothing else can be evaluated. Small steps need less memory.
    config.evaluation = defaults.evaluation(
        10,
        20,
        splits=(),
        final_splits=(),
        final_client_splits=("client_test",),
        batch_size=50,
    )
    config.execution = defaults.plain_execution(processes=1)
    return config
