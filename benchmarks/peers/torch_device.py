"""Where the PyTorch programs compute: on the processor, or on the first CUDA device.

Arrays are moved explicitly, since with PyTorch's default device each of its calls takes longer.
"""

import sys
import time

import numpy as np
import torch

_device = torch.device("cpu")


def use(accelerator: bool) -> None:
    """Chooses the device; ends the program with one line if there is no such device."""
    global _device
    if not accelerator:
        return
    if not torch.cuda.is_available():
        print("error: --accelerator: PyTorch finds no CUDA device.", file=sys.stderr)
        raise SystemExit(2)
    _device = torch.device("cuda")
    # TF32, which is XLA's default.
    torch.set_float32_matmul_precision("high")


def current() -> torch.device:
    """The device that was chosen; the processor if none was."""
    return _device


def tensor(array: np.ndarray) -> torch.Tensor:
    """An array on the device."""
    return torch.from_numpy(array).to(_device)


def clock() -> float:
    """Seconds, after waiting for all work on the device."""
    if _device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_mb() -> float | None:
    """Peak of the memory of PyTorch's tensors on the device; None on the processor."""
    if _device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated() / 1e6
