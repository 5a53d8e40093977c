"""The paper's claims, and the verdicts of our runs."""

from collections.abc import Iterable, Sequence

from experiments.studies.archive import Record
from experiments.studies.codistillation.claims import Claim, Comparison, claims
from experiments.studies.codistillation.findings import Finding, find, verdict
from experiments.studies.pages import Notes, Verdict, found
from experiments.studies.sections.markdown import estimate, rounds_of, table
from fedcodist.report.intervals import BINOMIAL

HEADING = "What the paper claims"
HEADINGS = ["Difference", "Paper", "Ours", "Interval", "Rounds", "Decided above zero"]


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """One for each claim."""
    return [
        Verdict(claim.text, verdict(_findings(claim, records)), f"Claim {number}")
        for number, claim in enumerate(claims(), start=1)
    ]


def verdict_tables(records: Sequence[Record], notes: Notes) -> list[str]:
    """Verdicts, then the differences behind them; differences of short runs have no numbers here."""
    rows, details = [], []
    for claim, (text, word, heading) in zip(claims(), verdicts(records), strict=True):
        findings = _findings(claim, records)
        decided = sum(finding.decided in ("yes", "no") for finding in findings)
        if any(finding.ours and finding.ours.kind == BINOMIAL for finding in findings):
            word += " ‡"
        rows.append([f"{heading}. {text}", f"**{word}**", f"{decided} of {len(findings)}"])
        lines = [
            _line(comparison, finding, with_numbers=not finding.is_short)
            for comparison, finding in zip(claim.comparisons, findings, strict=True)
        ]
        details += [f"### {heading}", f"{text}: **{word}**.", table(HEADINGS, lines)]
    summary = table(["Claim", "Verdict", "Differences decided"], rows, texts=2)
    return [f"## {HEADING}", notes["Claims"], summary, found(notes, "Claims"), *details]


def short_differences(records: Sequence[Record]) -> list[str]:
    """The claims' differences in short runs, which decide nothing; each difference once."""
    comparisons: Iterable[Comparison] = (c for claim in claims() for c in claim.comparisons)
    lines = [
        _line(comparison, finding, with_numbers=True)
        for comparison in dict.fromkeys(comparisons)
        if (finding := find(comparison, records)).is_short
    ]
    return ["### Differences", table(HEADINGS, lines)] if lines else []


def _findings(claim: Claim, records: Sequence[Record]) -> list[Finding]:
    return [find(comparison, records) for comparison in claim.comparisons]


def _line(comparison: Comparison, finding: Finding, with_numbers: bool) -> list[str]:
    ours = finding.ours if with_numbers else None
    return [
        comparison.text,
        "no numbers" if finding.paper is None else f"{finding.paper:+.2f}",
        estimate(ours) if ours else "",
        ours.kind if ours else "",
        rounds_of(finding.rounds, finding.full_rounds) if finding.ours else "",
        finding.decided,
    ]
