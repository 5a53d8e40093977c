"""The paper's claims, and what our runs say of them."""

from collections.abc import Sequence

from experiments.studies.codistillation.claims import claims
from experiments.studies.codistillation.findings import find, verdict
from experiments.studies.records import Record
from experiments.studies.sections.markdown import estimate, rounds_of, table
from fedcodist.report.intervals import BINOMIAL


def verdicts(records: Sequence[Record], note: str) -> list[str]:
    """Verdicts, the note, and then the differences that they rest on."""
    parts = [
        "## The paper's claims",
        "What the paper's Table 1 and Figure 4 say; the verdicts are read off our runs. A claim *holds* "
        "if every difference under it is above zero by more than its interval, *does not hold* if one "
        "is below zero by more than its interval; else there are *not enough runs*, or not of all "
        "their rounds (†), which decide nothing, or it is *undecided* as a difference lies within its "
        "interval. Each interval is at 95 % by itself. Runs "
        "compared have equal settings, rounds among them, in all but what the difference names. ‡ marks "
        "what rests on single seeds in part: their intervals cover the test images, not the seeds.",
    ]
    rows, details = [], []
    for number, claim in enumerate(claims(), start=1):
        findings = [find(comparison, records) for comparison in claim.comparisons]
        decided = sum(finding.decided in ("yes", "no") for finding in findings)
        word = verdict(findings) + (" †" if any(finding.is_short for finding in findings) else "")
        if any(finding.ours and finding.ours.kind == BINOMIAL for finding in findings):
            word += " ‡"
        rows.append([f"{number}. {claim.text}", f"**{word}**", f"{decided} of {len(findings)}"])
        lines = [
            [
                comparison.text,
                "no numbers" if finding.paper is None else f"{finding.paper:+.2f}",
                estimate(finding.ours) if finding.ours else "",
                finding.ours.kind if finding.ours else "",
                rounds_of(finding.rounds, finding.full_rounds) if finding.ours else "",
                finding.decided,
            ]
            for comparison, finding in zip(claim.comparisons, findings, strict=True)
        ]
        headings = ["Difference", "Paper", "Ours", "Interval", "Rounds", "Decided above zero"]
        details += [f"**{number}. {claim.text}: {word}**", table(headings, lines)]
    parts.append(table(["Claim", "Verdict", "Differences decided"], rows, texts=2))
    return [*parts, note, *details]
