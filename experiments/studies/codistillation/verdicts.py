"""The paper's claims, and the verdicts of our runs."""

from collections.abc import Iterable, Sequence

from experiments.studies.archive import Record
from experiments.studies.codistillation.claims import Claim, Comparison, claims
from experiments.studies.codistillation.findings import Finding, find, verdict
from experiments.studies.codistillation.table_1 import EARLIER, with_earlier_settings
from experiments.studies.pages import Notes
from experiments.studies.sections.markdown import estimate, rounds_of, table
from experiments.studies.verdicts import OPEN, Verdict
from fedcodist.report.intervals import ONE_SEED

HEADING = "What the paper claims"
HEADINGS = ["Difference", "Paper", "Ours", "Interval", "Rounds", "Verdict"]
NO_NUMBER = "–"


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """One for each claim."""
    return [
        _verdict(claim, _heading(number), _findings(claim, records))
        for number, claim in enumerate(claims(), start=1)
    ]


def earlier_verdicts(records: Sequence[Record]) -> list[Verdict]:
    """One for each claim on which runs `with_earlier_settings` say something."""
    earlier = with_earlier_settings(records)
    found = []
    for claim in claims():
        findings = [find(comparison, earlier, records) for comparison in claim.comparisons]
        if verdict(findings) != OPEN:
            about = claim._replace(text=f"{EARLIER}: {claim.text}")
            of_claim = _verdict(about, EARLIER, findings)
            found.append(of_claim._replace(again=EARLIER[0].lower() + EARLIER[1:]))
    return found


def verdict_details(records: Sequence[Record], notes: Notes) -> list[str]:
    """The differences behind each verdict; those of short runs have no numbers here."""
    details = []
    for number, claim in enumerate(claims(), start=1):
        findings = _findings(claim, records)
        of_claim = _verdict(claim, _heading(number), findings)
        lines = [
            _line(comparison, finding, with_numbers=not finding.is_short)
            for comparison, finding in zip(claim.comparisons, findings, strict=True)
        ]
        details += [f"### {of_claim.heading}", f"{claim.text}: **{of_claim.word}**."]
        details.append(table(HEADINGS, lines))
    return [f"## {HEADING}", notes["Claims"], *details]


def short_differences(records: Sequence[Record]) -> list[str]:
    """The claims' differences in short runs, which decide nothing; each difference once."""
    comparisons: Iterable[Comparison] = (c for claim in claims() for c in claim.comparisons)
    lines = [
        _line(comparison, finding, with_numbers=True)
        for comparison in dict.fromkeys(comparisons)
        if (finding := find(comparison, records)).is_short
    ]
    return ["### Differences", table(HEADINGS, lines)] if lines else []


def _heading(number: int) -> str:
    return f"Claim {number}"


def _findings(claim: Claim, records: Sequence[Record]) -> list[Finding]:
    return [find(comparison, records) for comparison in claim.comparisons]


def _verdict(claim: Claim, heading: str, findings: Sequence[Finding]) -> Verdict:
    """The claim's verdict, with numbers in the order of its comparisons; ‡ marks those of one seed."""
    has_one_seed = any(each.ours and each.ours.kind == ONE_SEED for each in findings)
    papers = [f"{each.paper:+.2f}" for each in findings if each.paper is not None]
    ours = [
        estimate(each.ours) if each.ours and not each.is_short else NO_NUMBER for each in findings
    ]
    shown = "" if set(ours) == {NO_NUMBER} else "; ".join(ours) + (" ‡" if has_one_seed else "")
    return Verdict(claim.text, verdict(findings), heading, "; ".join(papers), shown)


def _line(comparison: Comparison, finding: Finding, with_numbers: bool) -> list[str]:
    ours = finding.ours if with_numbers else None
    return [
        comparison.text,
        "no numbers" if finding.paper is None else f"{finding.paper:+.2f}",
        estimate(ours) if ours else "",
        ours.kind if ours else "",
        rounds_of(finding.rounds, finding.full_rounds) if finding.ours else "",
        finding.word,
    ]
