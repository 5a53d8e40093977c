"""The FedKD paper's column of costs, and what follows from an encoder's shapes."""

from experiments.studies.sections.markdown import table

# The paper's GB per client, and rounds (epochs): tables 2 and 3, by layers.
PAPER_COSTS = {
    "MIND": (3, {12: 2.05, 6: 1.03, 4: 0.69, 2: 0.35}),
    "SMM4H": (2, {12: 1.37, 6: 0.69, 4: 0.46, 2: 0.24}),
}
WIDTH = 768
# Six matrices, four of them square and two four times as wide, their biases, and two normalisations.
LAYER = 12 * WIDTH**2 + 13 * WIDTH


def paper_costs() -> str:
    """GB per client from an encoder's shapes, beside the paper's, and the shares that are left."""
    rows = []
    for layers in next(iter(PAPER_COSTS.values()))[1]:
        row = [str(layers)]
        for epochs, paper in PAPER_COSTS.values():
            cost = layers * LAYER * 4 * 2 * epochs / 1e9
            row += [f"{cost:.3f}", f"{paper[layers]:.2f}", f"{paper[layers] - cost:+.3f}"]
        rows.append(row)
    headings = ["Layers"]
    for name, (epochs, _) in PAPER_COSTS.items():
        headings += [f"{name}, {epochs} epochs: derived", "paper", "residual"]
    return table(headings, rows)
