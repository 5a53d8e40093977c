"""Flower's client: receives weights, trains on one client's examples, sends weights back."""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peers import torch_networks
from peers import workload as work

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains on the examples of the client that the message names."""
    config = message.content["config"]
    torch.set_num_threads(config["threads"])
    network, clients = load(config["inputs"], config["workload"], config["double"])
    images, labels = clients[config["client"]]
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    torch_networks.train_client(network, images, labels)
    content = RecordDict(
        {
            "arrays": ArrayRecord(network.state_dict()),
            "metrics": MetricRecord({"num-examples": len(labels)}),
        }
    )
    return Message(content=content, reply_to=message)


@functools.cache
def load(path: str, workload: str, double: bool):
    """The actor's network and all clients' examples, read and made once per actor."""
    if double:
        torch.set_default_dtype(torch.float64)
    inputs = work.read_inputs(Path(path), workload, double)
    clients = range(len(inputs.offsets) - 1)
    return (
        torch_networks.make_network(inputs.pool.network),
        [torch_networks.client_tensors(inputs, client) for client in clients],
    )
