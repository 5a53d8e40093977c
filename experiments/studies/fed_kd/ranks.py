"""Ranks of clients' updates and gradients by round, and their spectra (the paper's figures 6 and 7)."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.studies import figures
from experiments.studies.archive import Record
from experiments.studies.fed_kd.panels import FED_KD, STUDENT, Panel
from experiments.studies.figures import Spectrum
from experiments.studies.pages import Notes, Plots
from experiments.studies.sections.markdown import image, table
from fedcodist.compression.svd import rank_for, threshold


def ranks_tables(records: Sequence[Record], panel: Panel, notes: Notes, plots: Plots) -> list[str]:
    """Ranks by round, and spectra of the first and last round, of the newest run that recorded them.

    First those of clients' updates, then those of gradients, if the run recorded them too.
    """
    looked = [
        record
        for record in records
        if (record.experiment, record.run) == (panel.experiment, panel.run(FED_KD.run))
        and record.finished
        and record.spectra.get(STUDENT)
    ]
    if not looked:
        return []
    record = max(looked, key=lambda record: record.date or "")
    parts = _ranks_of(record, record.spectra[STUDENT], panel, "updates", plots)
    if STUDENT in record.gradient_spectra:
        parts += _ranks_of(record, record.gradient_spectra[STUDENT], panel, "gradients", plots)
    return [*parts, notes["Ranks"]]


def _ranks_of(
    record: Record, spectra: Mapping[str, dict], panel: Panel, of: str, plots: Plots
) -> list[str]:
    """Table and plot of clients' `of`, "updates" or "gradients"."""
    layers = {
        layer: Spectrum(*(tuple(parts[part]) for part in ("round", "rank", "first", "last")))
        for layer, parts in spectra.items()
    }
    shown = next(iter(layers.values())).rounds
    link = record.config["training"]["compression"]
    shares = [
        float(threshold(link["start"], link["end"], number / record.rounds)) for number in shown
    ]
    rows = [
        [
            f"`{layer}`",
            str(len(spectrum.first)),
            *(f"{spectrum.ranks[place]:.1f}" for place in (0, -1)),
            *(
                str(int(rank_for(np.array(values), shares[0])))
                for values in (spectrum.first, spectrum.last)
            ),
        ]
        for layer, spectrum in layers.items()
    ]
    ends = [f"round {number}" for number in (shown[0], shown[-1])]
    headings = [f"{end}, T = {shares[place]:.3f}" for end, place in zip(ends, (0, -1), strict=True)]
    headings += [f"{end}, T = {shares[0]:.3f}, mean spectrum" for end in ends]
    name = f"{panel.experiment}_{'' if of == 'updates' else 'gradient_'}ranks.png"
    plots[name] = lambda: figures.ranks_plot(layers)
    return [
        f"**Singular values of {of} that the energy threshold keeps, {panel.title}**",
        table(["Layer", "all", *headings], rows),
        image(name, f"Ranks by round and singular values of clients' {of}"),
    ]
