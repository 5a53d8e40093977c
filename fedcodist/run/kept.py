"""The state that a callback keeps, beside a run's newest checkpoints."""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedcodist.run.checkpoint import load_checkpoint, save_checkpoint

PyTree = Any


class KeptState:
    """One whole state, in memory and, from the run's next checkpoint on, in the folder `kept` beside it.

    It is written together with a checkpoint, so a resumed run never finds a state of a later round. The
    previous state stays in the folder too, in case the run is killed between the two files.

    Args:
      checkpoints: the run's folder of checkpoints; None keeps in memory only.
      round: the round that was kept when the run's checkpoint was made; None where none was.
    """

    def __init__(self, checkpoints: Path | None, round: int | None):
        self.round = round
        self._folder = None if checkpoints is None else checkpoints / "kept"
        self._whole: PyTree = None
        self._is_saved = True

    def keep(self, round: int, whole: PyTree) -> None:
        """Keeps a copy of a state in place of the one before."""
        self.round, self._is_saved = round, False
        self._whole = jax.tree.map(np.array, whole)  # the originals' memory is reused

    def save(self) -> None:
        """Writes what was kept since the last call, before the run's own checkpoint."""
        if self._folder is not None and self.round is not None and not self._is_saved:
            save_checkpoint(self._folder, self.round, self._whole, {})
            self._is_saved = True

    def whole(self, like: PyTree) -> PyTree:
        """The kept state, or None.

        Args:
          like: its shapes, as `load_checkpoint` takes them.
        """
        if self.round is None or self._whole is not None or self._folder is None:
            return self._whole
        saved = load_checkpoint(self._folder, like, self.round)
        if saved is None:
            warnings.warn(
                f"{self._folder}: the checkpoint of the kept round {self.round} cannot be read, so that "
                "the run ends without kept models.",
                stacklevel=2,
            )
            return None
        return saved.state
