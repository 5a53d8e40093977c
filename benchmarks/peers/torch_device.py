"""Where the PyTorch programs compute: on the processor, or on the first CUDA device.

Everything is moved by hand: with PyTorch's own default device each of its calls would take longer.
"""

import sys
import time

import numpy as np
import torch

_device = torch.device("cpu")


def use(accelerator: bool) -> None:
    """Chooses the device; ends the program with one line where it is not there."""
    global _device
    if not accelerator:
        return
    if not torch.cuda.is_available():
        print("error: --accelerator: PyTorch finds no CUDA device.", file=sys.stderr)
        raise SystemExit(2)
    _device = torch.device("cuda")
    # TF32, as XLA does where nothing else is asked for.
    torch.set_float32_matmul_precision("high")


def current() -> torch.device:
    """The device that was chosen, at first the processor."""
    return _device


def tensor(array: np.ndarray) -> torch.Tensor:
    """An array on the device."""
    return torch.from_numpy(array).to(_device)


def clock() -> float:
    """Seconds, once everything that was asked of the device is done."""
    if _device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_mb() -> float | None:
    """Peak of the memory of PyTorch's tensors on the device; None on the processor."""
    if _device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated() / 1e6
