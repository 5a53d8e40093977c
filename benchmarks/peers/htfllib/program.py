"""HtFLlib's own clients and servers on the workloads htfl_*; its code is not in this repository.

    git clone https://github.com/TsingZ0/HtFLlib
    git -C HtFLlib checkout e959261d906f40377410bc4d9d13ba3f6af56782
    export HTFLLIB=$PWD/HtFLlib

A round is a round of its server's `train`. As in HtFLlib, clients are loaded from files and saved to
files in every round. Weights and examples are written where HtFLlib reads them. These are the
differences:

- HtFLlib evaluates before every round. This is left out, here and in the other programs.
- FML's divergence has fixed targets and is a mean over examples, as in its paper. HtFLlib's is a mean
  over logits too, and its gradient passes through both networks twice, which takes longer.
- FD's regulariser is the divergence between softmaxes, with the label's mean logits as the target.
  HtFLlib uses these logits as probabilities.
- Gradients of FML and FedKD are not clipped at a norm of 10, which is not in the papers.
- FedKD starts with the identity as W^h. HtFLlib decomposes weights and ours decomposes their changes, so
  weights are compared without SVD.
- torchvision is not needed: the networks are those of HtFLlib's own files.
"""

import contextlib
import hashlib
import importlib
import os
import sys
import tempfile
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from peers import measuring, torch_networks
from peers import workload as work

FOLDER = "HTFLLIB"  # the environment variable
COMMIT = "e959261d906f40377410bc4d9d13ba3f6af56782"
# SHA-256 of the files that are read, in their order: see `checksum`.
CHECKSUM = "06b8065539055fbd34bffea03f83c1f59b72a57530843c4f0e6c393a10a87c71"
READ = (
    "system/flcore/clients/client[!k]*.py",
    "system/flcore/servers/server[!k]*.py",
    "system/flcore/trainmodel/*.py",
    "system/flcore/clients/clientkd.py",
    "system/flcore/servers/serverkd.py",
    "system/utils/data_utils.py",
)
# Method -> its server's module and class.
SERVERS = {
    "local_only": ("serverlocal", "Local"),
    "fd": ("serverfd", "FD"),
    "fml": ("serverfml", "FML"),
    "lg_fed_avg": ("serverlg", "LG_FedAvg"),
    "fed_proto": ("serverproto", "FedProto"),
    "fed_kd_parties": ("serverkd", "FedKD"),
}
DATA = "benchmark"  # the data set's folder
TEST_EXAMPLES = 10  # not used


def main() -> int:
    """Runs the benchmark."""
    arguments = measuring.parse_arguments(__doc__, most_processes=1)
    method = arguments.workload.removeprefix("htfl_")
    if method not in SERVERS:
        print(f"error: HtFLlib has no workload {arguments.workload}.", file=sys.stderr)
        return 2
    folder = htfllib()
    torch.set_num_threads(arguments.threads)
    if arguments.double:
        torch.set_default_dtype(torch.float64)
    inputs = work.read_inputs(arguments.inputs, arguments.workload, arguments.double)
    with tempfile.TemporaryDirectory() as place, quiet():
        # HtFLlib reads ../dataset and writes its clients into the current folder.
        (Path(place) / "system").mkdir()
        os.chdir(Path(place) / "system")
        write_examples(inputs)
        federation = Federation(folder, method, inputs)
        rounds = 0

        def train(count):
            nonlocal rounds
            for _ in range(count):
                # The first rounds have the orders in the file, so that weights can be compared.
                if arguments.save_weights and 0 < rounds < work.HTFL_ORDERS:
                    write_examples(inputs, rounds)
                federation.train_round()
                rounds += 1

        times = measuring.run(
            train,
            lambda: measuring.save_weights(federation.weights(), arguments),
            arguments,
            time.perf_counter,
        )
        memory = measuring.peak_memory_mb()
        os.chdir("/")
    measuring.report(
        "htfllib", f"{COMMIT[:7]}, torch {torch.__version__}", arguments, times, memory
    )
    return 0


def htfllib() -> Path:
    """The checkout, whose modules can be imported afterwards; ends the program if there is none."""
    folder = Path(os.environ.get(FOLDER) or "nowhere")
    if not (folder / "system" / "flcore").is_dir():
        said = f"{FOLDER} must be a checkout of github.com/TsingZ0/HtFLlib, got {folder}."
        print(f"error: {said}", file=sys.stderr)
        raise SystemExit(2)
    if (found := checksum(folder)) != CHECKSUM:
        print(
            f"error: {FOLDER} {folder} is not at commit {COMMIT}: its files have checksum {found}.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    # HtFLlib loads whole models, which newer versions of PyTorch refuse by default.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    sys.modules.setdefault("torchvision", types.ModuleType("torchvision"))
    sys.path.insert(0, str(folder / "system"))
    return folder


def checksum(folder: Path) -> str:
    """SHA-256 over names and contents of READ."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in READ for path in folder.glob(pattern)):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


class Federation:
    """A server of HtFLlib's and its clients."""

    def __init__(self, folder: Path, method: str, inputs: work.Inputs):
        module, name = SERVERS[method]
        self.files = importlib.import_module("flcore.clients.clientbase")
        self.inputs, self.method = inputs, method
        self.names = [name for name in inputs.pools if name != work.MEME]
        networks = [inputs.pools[name].network for name in self.names]
        if method in work.WITH_MEME:
            torch.nn.utils.clip_grad_norm_ = lambda parameters, most: None
        server_class = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
        self.server = server_class(settings(method, networks), 0)
        for client, own in zip(self.server.clients, self.names, strict=True):
            self._start(client, "model", inputs.pools[own])
            if method == "fml":
                client.KL = divergence
            if method == "fd":
                client.loss = cross_entropy_or_divergence
        if method in work.WITH_MEME:
            self._start(self.server, "global_model", inputs.pools[work.MEME])
        if method == "fed_kd_parties":
            self._start_students(inputs.pools[work.MEME])
        if method == "lg_fed_avg":
            head = self._load(self.server.clients[0], "model").head
            self.files.save_item(head, self.server.role, "head", self.server.save_folder_name)
        # Of `train`, only the rounds are needed: no evaluation, and no results at its end.
        self.server.evaluate = lambda: self.server.rs_test_acc.append(0.0)
        self.server.save_results = lambda: None
        self.server.global_rounds = OneRound(0)  # the server trains one more round than this
        self.rounds = 0

    def train_round(self) -> None:
        """Trains a round as its server does."""
        self.rounds += 1
        self.server.global_rounds.share = min(1.0, self.rounds / work.HTFL_ROUNDS)
        self.server.Budget = [0.0]  # at the end the server takes the mean over all but the first
        self.server.train()
        self.server.rs_test_acc.clear()

    def weights(self) -> dict[str, dict[str, np.ndarray]]:
        """The weights of all clients and the meme in the common layout; heads as they are sent next."""
        found = {}
        for client, name in zip(self.server.clients, self.names, strict=True):
            if hasattr(
                client, "set_parameters"
            ):  # LG-FedAvg sends the head at the start of a round
                client.set_parameters()
            network = self.inputs.pools[name].network
            found[name] = common_weights(self._load(client, "model"), network)
        if work.MEME in self.inputs.pools:
            # FedKD's server keeps no model, and all clients have received the same.
            owner = self.server if self.method == "fml" else self.server.clients[0]
            meme = self._load(owner, "global_model")
            found[work.MEME] = common_weights(meme, self.inputs.pools[work.MEME].network)
        return found

    def _start_students(self, pool: work.Pool) -> None:
        """Gives the clients' copies of FedKD's student their weights, and W^h the identity."""
        for client in self.server.clients:
            self._start(client, "global_model", pool)
            to_teacher = self._load(client, "W_h")
            torch.nn.init.eye_(to_teacher.weight)
            self.files.save_item(to_teacher, client.role, "W_h", client.save_folder_name)
        if torch.get_default_dtype() == torch.float64:  # weights are compared
            for module in ("clients.clientkd", "servers.serverkd"):
                file = importlib.import_module(f"flcore.{module}")
                file.decomposition = whole

    def _load(self, owner, item):
        return self.files.load_item(owner.role, item, owner.save_folder_name)

    def _start(self, owner, item: str, pool: work.Pool) -> None:
        """Gives a model in a file the weights of the inputs."""
        model = self._load(owner, item)
        with torch.no_grad():
            for name, tensor in tensors(model, pool.network).items():
                kernel = pool.weights[name]
                if name.endswith("kernel"):
                    kernel = torch_networks.kernel_to_torch(kernel, flattened(name))
                tensor.copy_(torch.tensor(kernel))
        if torch.get_default_dtype() == torch.float64:
            model.base.register_forward_pre_hook(in_double)
        self.files.save_item(model, owner.role, item, owner.save_folder_name)


class OneRound(int):
    """Zero further rounds. FedKD's server divides by it for the share of the rounds that are done."""

    share = 0.0

    def __rtruediv__(self, other):
        return self.share


def whole(parameters, energy) -> dict[str, np.ndarray]:
    """In place of HtFLlib's SVD: the parameters as they are."""
    del energy
    return {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in parameters
    }


def settings(method: str, networks) -> types.SimpleNamespace:
    """The settings that HtFLlib's command line would give."""
    made = {"cnn": "FedAvgCNN(in_features=3, num_classes=args.num_classes, dim=1600)"}
    models = [made.get(n.kind, f"{n.kind}(num_classes=args.num_classes)") for n in networks]
    return types.SimpleNamespace(
        algorithm=method,
        dataset=DATA,
        models=models,
        num_classes=networks[0].classes,
        num_clients=len(networks),
        feature_dim=work.HTFL_EMBEDDING,
        batch_size=work.HTFL_BATCH,
        local_learning_rate=work.HTFL_RATE,
        alpha=work.HTFL_LABELS,
        beta=work.HTFL_LABELS,
        lamda=work.HTFL_WEIGHT,
        mentee_learning_rate=work.HTFL_RATE,
        T_start=work.HTFL_ENERGY[0],
        T_end=work.HTFL_ENERGY[1],
        local_epochs=1,
        global_rounds=0,
        join_ratio=1.0,
        random_join_ratio=False,
        client_drop_rate=0.0,
        train_slow_rate=0.0,
        send_slow_rate=0.0,
        time_select=False,
        time_threthold=10000,
        auto_break=False,
        top_cnt=100,
        eval_gap=1,
        few_shot=0,
        goal="benchmark",
        device="cpu",
        save_folder_name="temp",
        models_folder_name="",
    )


def write_examples(inputs: work.Inputs, round: int = 0) -> None:
    """Writes every client's files, its examples in the order in which it visits them in a round."""
    clients = [name for name in inputs.pools if name != work.MEME]
    for index, name in enumerate(clients):
        order = inputs.pools[name].orders["visited"][round]
        rows = np.arange(len(inputs.labels))[inputs.rows_of(index)][order]
        images = inputs.images[rows].transpose(0, 3, 1, 2)
        for split, count in (("train", len(rows)), ("test", TEST_EXAMPLES)):
            folder = Path("..", "dataset", DATA, split)
            folder.mkdir(parents=True, exist_ok=True)
            examples = {"x": images[:count], "y": inputs.labels[rows][:count]}
            np.savez(folder / f"{index}.npz", data=np.array(examples, dtype=object))


def tensors(model: torch.nn.Module, network: work.HtFLNetwork) -> dict[str, torch.Tensor]:
    """'layer/leaf' in the common layout -> the parameter of one of its models."""
    base = model.base
    layers = {"head": model.head}
    if network.kind == "cnn":
        layers |= {"conv1": base.conv1[0], "conv2": base.conv2[0], "dense": base.fc1[0]}
    else:
        layers |= {"stem": base.conv1, "stem_norm": base.bn1}
        for stage in range(work.htfl_stages(network)):
            block, name = getattr(base, f"layer_{stage}"), f"stage{stage + 1}_block1"
            layers |= {f"{name}/conv1": block.conv1, f"{name}/norm1": block.bn2}
            layers |= {f"{name}/conv2": block.conv2, f"{name}/norm2": block.bn3}
            if block.downsample is not None:
                layers[f"{name}/shortcut"], layers[f"{name}/shortcut_norm"] = block.downsample
    found = {}
    for name, layer in layers.items():
        is_norm = isinstance(layer, torch.nn.BatchNorm2d)
        found[f"{name}/{'scale' if is_norm else 'kernel'}"] = layer.weight
        if layer.bias is not None:
            found[f"{name}/bias"] = layer.bias
    return {name: found[name] for name in work.weight_shapes(network)}


def common_weights(model: torch.nn.Module, network: work.HtFLNetwork) -> dict[str, np.ndarray]:
    """A model's weights in the common layout."""
    found = {}
    for name, tensor in tensors(model, network).items():
        value = tensor.detach().numpy()
        if name.endswith("kernel"):
            value = torch_networks.kernel_from_torch(value, flattened(name))
        found[name] = np.array(value)
    return found


def flattened(name: str) -> tuple[int, ...]:
    """The shape of the array that is flattened before a layer, or ()."""
    return (5, 5, 64) if name.startswith("dense/") else ()


def divergence(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(target || prediction) of log-probabilities and probabilities, a mean over examples."""
    return torch.nn.functional.kl_div(predicted, target.detach(), reduction="batchmean")


def cross_entropy_or_divergence(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy for targets that are labels; KL(softmax(target) || softmax(logits)) for logits."""
    if target.is_floating_point():
        return divergence(logits.log_softmax(1), target.softmax(1))
    return torch.nn.functional.cross_entropy(logits, target)


def in_double(module, inputs):
    """Casts inputs to float64, since HtFLlib's examples are always float32."""
    return tuple(each.double() for each in inputs)


@contextlib.contextmanager
def quiet():
    """Discards what HtFLlib prints in every round."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


if __name__ == "__main__":
    sys.exit(main())
