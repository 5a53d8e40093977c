"""Colours and markers of plots: a method has the same ones in every plot."""

import zlib
from collections.abc import Sequence

# Okabe and Ito's colours, told apart by colour-blind readers; their yellow is too pale for lines.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
BLACK, BLUE, VERMILION, GREEN, PINK, SKY, ORANGE = COLOURS
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", (0, (1, 1)))

# Methods in the same paper's tables differ in colour; baselines are black.
METHOD_STYLES = {
    "fed_avg": (BLACK, "o"),
    "local_only": (BLACK, "s"),
    "local_only_steps": (BLACK, "D"),
    "centralised": (BLACK, "^"),
    "decentralised_fed_avg": (BLACK, "v"),
    "periodic_codistillation": (BLUE, "s"),
    "decentralised_periodic_codistillation": (BLUE, "D"),
    "fed_gkd": (BLUE, "o"),
    "fed_ntd": (BLUE, "^"),
    "moon": (BLUE, "v"),
    "merged_codistillation": (VERMILION, "^"),
    "fed_kd": (VERMILION, "o"),
    "fed_kd_parties": (VERMILION, "*"),
    "fed_md": (VERMILION, "s"),
    "fed_sdd": (GREEN, "o"),
    "fed_sdd_pools": (GREEN, "^"),
    "multi_headed_distillation": (GREEN, "s"),
    "fml": (GREEN, "v"),
    "ds_fl": (PINK, "o"),
    "fed_proto": (GREEN, "D"),
    "fed_gh": (SKY, "D"),
    "fed_tgp": (PINK, "D"),
    "scaffold": (PINK, "s"),
    "fed_ensemble": (PINK, "^"),
    "fetch_sgd": (PINK, "X"),
    "fed_df": (SKY, "s"),
    "hetero_fl": (SKY, "v"),
    "fed_rolex": (SKY, "^"),
    "fjord": (ORANGE, "s"),
    "depth_fl": (SKY, "o"),
    "fed_dropout": (SKY, "P"),
    "fed_prox": (ORANGE, "o"),
    "fed_be": (ORANGE, "D"),
    "fd": (ORANGE, "^"),
    "lg_fed_avg": (GREEN, "P"),
    "kt_pfl": (SKY, "X"),
    "fed_gen": (ORANGE, "P"),
    "fed_per": (PINK, "v"),
    "fed_rep": (PINK, "P"),
    "fed_bn": (BLUE, "P"),
    "fed_babu": (BLUE, "X"),
    "lg_fed_avg_one": (VERMILION, "v"),
    "ditto": (VERMILION, "P"),
    "apfl": (VERMILION, "X"),
    "p_fed_me": (VERMILION, "D"),
    "per_fed_avg": (GREEN, "*"),
    "fed_et": (GREEN, "X"),
    "fccl": (ORANGE, "v"),
    "fed_mrl": (ORANGE, "*"),
    "fed_l2g": (ORANGE, "X"),
}


def style(method: str) -> tuple[str, str]:
    """A method's colour and marker. Those of a method outside the library follow from its name."""
    if method in METHOD_STYLES:
        return METHOD_STYLES[method]
    number = zlib.crc32(method.encode())
    return COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]


def styles(methods: Sequence[str]) -> list[tuple[str, str]]:
    """The style of each method. A repeated method, with other settings, gets the first free style."""
    taken = {style(method) for method in methods}
    free = [(c, m) for m, c in _pairs() if (c, m) not in taken]
    seen: set[str] = set()
    chosen = []
    for method in methods:
        chosen.append(free.pop(0) if method in seen and free else style(method))
        seen.add(method)
    return chosen


def _pairs() -> list[tuple[str, str]]:
    """All pairs of colour and marker; the colours change first."""
    return [(marker, colour) for marker in MARKERS for colour in COLOURS]
