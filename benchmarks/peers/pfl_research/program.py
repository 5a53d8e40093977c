"""pfl-research's simulated backend, as one process or as several started by torchrun."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from peers import measuring
from peers import workload as work

# torchrun sets this in the processes that it starts.
STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"


def main() -> int:
    """Measures, in several processes if the arguments say so."""
    arguments = measuring.parse_arguments(__doc__, accelerated=True)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ["PFL_PYTORCH_DEVICE"] = "cuda" if arguments.accelerator else "cpu"
    if arguments.processes > 1 and STARTED_BY_TORCHRUN not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        processes = f"--nproc-per-node={arguments.processes}"
        os.execv(sys.executable, [sys.executable, *torchrun, processes, *sys.argv])
    measure(arguments)
    return 0


def measure(arguments) -> None:
    """Trains and reports. The imports are made only here, since they join the processes."""
    import numpy as np
    import torch
    from peers import torch_device, torch_networks
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    torch_device.use(arguments.accelerator)
    torch.set_num_threads(arguments.threads)
    if arguments.double:
        torch.set_default_dtype(torch.float64)
    inputs = work.read_inputs(arguments.inputs, arguments.workload, arguments.double)
    network = make_network(inputs.pool.network)
    torch_networks.load_weights(network, inputs.pool.weights)
    rank = pytorch_ops.distributed.global_rank
    ends = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            ends.append(torch_device.clock())
            if central_iteration == 0 and rank == 0:
                weights = torch_networks.common_weights(network)
                measuring.save_weights({work.POOL: weights}, arguments)
            return False, Metrics()

    server_optimizer = torch.optim.Adam(
        network.parameters(), work.SERVER_LEARNING_RATE, work.SERVER_BETAS, work.SERVER_EPSILON
    )
    model = PyTorchModel(network, torch.optim.SGD, server_optimizer)
    data = make_data(inputs, measuring.cohorts(inputs, arguments))
    rounds = measuring.total_rounds(arguments)
    cohort = work.WORKLOADS[inputs.workload].cohort
    postprocessors = make_postprocessors(inputs.privacy)
    # A private server draws its noise with NumPy. Every process adds it to the same sum, so all must
    # draw the same.
    np.random.seed(0)
    started = torch_device.clock()
    unevaluated(FederatedAveraging)().run(
        NNAlgorithmParams(rounds + 1, rounds + 1, cohort, val_cohort_size=0),
        SimulatedBackend(data, None, postprocessors),
        model,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=work.CLIENT_LEARNING_RATE,
            local_batch_size=work.BATCH,
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    several = arguments.processes > 1
    if rank == 0:
        memory = measuring.peak_memory_mb(os.getppid() if several else None)
        times = measuring.ends_of_parts(started, ends, arguments)
        name = f"{version('pfl')}, torch {torch.__version__}"
        device_mb = torch_device.peak_mb()
        measuring.report("pfl_research", name, arguments, times, memory, peak_device_mb=device_mb)
    if several:
        torch.distributed.barrier()


def unevaluated(algorithm):
    """An algorithm of pfl-research that evaluates no clients, if its frequency is that of its end.

    pfl-research evaluates clients before and after their training in every round whose number is a
    multiple of the frequency. Zero is one of any frequency, so its rounds are numbered from 1 here.
    """

    class Unevaluated(algorithm):
        def get_next_central_contexts(self, model, iteration, *others):
            return super().get_next_central_contexts(model, iteration + 1, *others)

    return Unevaluated


def make_postprocessors(privacy: work.Privacy | None):
    """What happens to clients' updates before they are summed, and to their sum."""
    from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    if privacy is None:
        return [WeightByDatapoints()]
    return [WeightByUser(), CentrallyAppliedPrivacyMechanism(GaussianMechanism(*privacy))]


def make_network(network: work.Network | work.LanguageNetwork):
    """A workload's network with the two methods that pfl-research requires of a module."""
    import torch
    from peers import torch_networks
    from pfl.metrics import Weighted

    class Trainable(torch_networks.kind_of(network)):
        def loss(self, images, labels):
            return torch_networks.loss(self(images), labels)

        @torch.no_grad()
        def metrics(self, images, labels):
            return {"loss": Weighted(self.loss(images, labels).item() * len(labels), len(labels))}

    return Trainable(network)


def make_data(inputs: work.Inputs, cohorts):
    """The clients as a federated data set whose sampler follows the cohorts."""
    import numpy as np
    from peers import torch_networks
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset

    sizes = np.diff(inputs.offsets)
    datasets = [
        PyTorchTensorDataset(torch_networks.client_tensors(inputs, client))
        for client in range(len(sizes))
    ]
    clients = (int(client) for cohort in cohorts for client in cohort)
    # With these weights pfl-research deals unequal clients to processes evenly.
    weights = dict(enumerate(sizes.tolist())) if len(set(sizes.tolist())) > 1 else None
    return FederatedDataset(datasets.__getitem__, lambda: next(clients), weights)


if __name__ == "__main__":
    sys.exit(main())
