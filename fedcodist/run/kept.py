"""The state that a callback keeps, beside a run's newest checkpoints."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedcodist.core.devices import from_all_processes
from fedcodist.run.checkpoint import load_checkpoint, save_checkpoint

PyTree = Any


class KeptState:
    """One whole state, in memory until the run's next checkpoint, then in the folder `kept` beside it.

    It is written together with a checkpoint, so a resumed run never finds a state of a later round. The
    previous state stays in the folder too, in case the run is killed between the two files. Without a
    folder it stays in memory.

    Args:
      checkpoints: the run's folder of checkpoints; None keeps in memory only.
      round: the round that was kept when the run's checkpoint was made; None where none was.
      writes: whether this process writes the folder. The others read it at the end of the run.
    """

    def __init__(self, checkpoints: Path | None, round: int | None, writes: bool):
        self.round = round
        self._folder = None if checkpoints is None else checkpoints / "kept"
        self._is_holder = writes or checkpoints is None
        self._whole: PyTree = None

    def keep(self, round: int, whole: Callable[[], PyTree]) -> None:
        """Keeps a copy of the state that `whole` returns in place of the one before."""
        self.round = round
        if self._is_holder:
            self._whole = jax.tree.map(np.array, whole())  # the originals' memory is reused

    def save(self) -> None:
        """Writes what was kept since the last call, before the run's own checkpoint."""
        if self._folder is not None and self.round is not None and self._whole is not None:
            save_checkpoint(self._folder, self.round, self._whole, {})
            self._whole = None

    def whole(self, like: PyTree) -> PyTree:
        """The kept state, or None, in all processes. What was kept is saved by then.

        Args:
          like: its shapes, as `load_checkpoint` takes them.
        """
        if self.round is None or self._folder is None:
            return self._whole
        from_all_processes(0)  # process 0 has written the file now
        saved = load_checkpoint(self._folder, like, self.round)
        # The kept models are evaluated by all processes, or by none.
        is_read = from_all_processes(int(saved is not None))
        if saved is None or not all(is_read):
            where = "" if saved is None else f" by process {is_read.index(0)}"
            warnings.warn(
                f"{self._folder}: the checkpoint of the kept round {self.round} cannot be read{where}, "
                "so that the run ends without kept models.",
                stacklevel=2,
            )
            return None
        return saved.state
