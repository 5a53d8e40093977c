"""FedSDD's distillation in PyTorch (Kwan and Song, 2023): all models teach the first one."""

import copy

import torch
from peers import workload as work


def teach(models, batches) -> None:
    """Trains the first model towards the mean logits of all models, with their weights before.

    The divergence has a temperature on both sides and is multiplied by its square. The student uses the
    statistics of each batch, the teachers their running averages.

    Args:
      models: networks, the student first.
      batches: of images.
    """
    student, temperature = models[0], work.TEACHING_TEMPERATURE
    teachers = [copy.deepcopy(model).eval() for model in models]
    optimizer = torch.optim.SGD(student.parameters(), work.TEACHING_RATE)
    for images in batches:
        with torch.no_grad():
            logits = torch.stack([teacher(images) for teacher in teachers]).mean(0)
        target = (logits / temperature).softmax(1)
        optimizer.zero_grad()
        # The divergence from the target up to a constant.
        loss = torch.nn.functional.cross_entropy(student(images) / temperature, target)
        (temperature**2 * loss).backward()
        optimizer.step()
