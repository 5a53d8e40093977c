"""Codistillation in PyTorch (Lichtarge et al.): models teach each other on unlabelled batches."""

import copy

import torch
from peers import workload as work


def distill(models, batches):
    """Students start from the models and learn from the frozen models; each is evaluated once per batch.

    A student's target is the other model's prediction, mixed with a share of its own initial prediction.

    Args:
      models: name -> network, two.
      batches: of images.

    Returns:
      name -> trained copy.
    """
    students = {name: copy.deepcopy(model) for name, model in models.items()}
    optimizers = {
        name: torch.optim.Adam(
            student.parameters(), work.STUDENT_LEARNING_RATE, eps=work.STUDENT_EPSILON
        )
        for name, student in students.items()
    }
    first, second = models
    other = {first: second, second: first}
    own_share = work.INTERPOLATION
    for images in batches:
        with torch.no_grad():
            predicted = {name: model(images).softmax(1) for name, model in models.items()}
        for name, student in students.items():
            target = (1 - own_share) * predicted[other[name]] + own_share * predicted[name]
            optimizers[name].zero_grad()
            # The divergence from the target up to a constant.
            torch.nn.functional.cross_entropy(student(images), target).backward()
            optimizers[name].step()
    return students


def merge(model, student) -> None:
    """Mixes the difference to the student, scaled to the gradient's norm, into the model's gradient."""
    parameters = list(model.parameters())
    with torch.no_grad():
        ways = [p - own for p, own in zip(parameters, student.parameters(), strict=True)]
        gradient, way = (_norm(p.grad for p in parameters), _norm(ways))
        scale = (1 - work.ALPHA) * (gradient / way)
        for parameter, each in zip(parameters, ways, strict=True):
            parameter.grad.mul_(work.ALPHA).add_(each * scale)


def _norm(tensors):
    return torch.stack([tensor.norm() for tensor in tensors]).norm()
