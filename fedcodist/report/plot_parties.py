"""FedMD's figure 2: accuracy of each party by round, compared with two means."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from fedcodist.report.plots import legend
from fedcodist.report.styles import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PartyCurve(NamedTuple):
    """A party's mean accuracy over the seeds in %, by round."""

    rounds: tuple[int, ...]
    means: tuple[float, ...]


def parties_plot(
    parties: Mapping[str, PartyCurve], baseline: float, bound: float | None
) -> "Figure":
    """FedMD's figure 2: accuracy of each party by round, with two levels.

    Args:
      parties: curve of each party by name.
      baseline: mean of parties without collaboration, a dashed line.
      bound: mean of parties with all private examples, a dashed and dotted line; None if it was not run.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axis = figure.subplots()
    axis.grid(color="0.9", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("Round of collaboration")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("Test accuracy (%)")
    for number, (party, curve) in enumerate(parties.items()):
        colour = COLOURS[number % len(COLOURS)]
        marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
        axis.plot(
            curve.rounds,
            curve.means,
            color=colour,
            marker=marker,
            # Markers are hollow if a colour is used a second time.
            markerfacecolor="white" if number >= len(COLOURS) else colour,
            markersize=3.5,
            linewidth=1.4,
            label=party,
        )
    axis.axhline(baseline, color="0.3", linestyle="--", linewidth=1.2, label="no collaboration")
    if bound is not None:
        axis.axhline(
            bound, color="0.3", linestyle="-.", linewidth=1.2, label="all examples in one place"
        )
    legend(figure, [axis], columns=2)
    return figure
