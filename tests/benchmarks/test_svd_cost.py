"""SVD's share of a round: taken within turns, and the three programs once, tiny."""

import pytest

from benchmarks import document, records, svd_cost
from benchmarks.svd_cost import (
    EQUAL,
    EXACT,
    EXACTLY,
    FALLING,
    SUBSPACE,
    WHOLE,
    WITHIN,
    Round,
)


def test_shares_are_taken_within_turns():
    rounds = {
        WHOLE: Round((1.0, 2.0, 4.0), 4000.0),
        EXACT: Round((2.0, 4.0, 8.0), 1000.0),
        SUBSPACE: Round((1.25, 2.5, 4.0), 1100.0),
    }
    assert [svd_cost.share(rounds, kind) for kind in rounds] == [0.0, 0.5, pytest.approx(0.2)]
    lines = svd_cost.table(rounds).splitlines()
    assert lines[2].split()[-4:] == ["4000.0", "50.0", "%", "1.0"]


def test_nothing_is_not_measured(capsys):
    with pytest.raises(SystemExit):
        svd_cost.main(["--turns=0"])
    assert "--turns must be at least 1, got 0" in capsys.readouterr().err


def test_both_decompositions_are_of_the_same_matrices():
    matrices = svd_cost.decompose({(24, 16): 1, (16, 24): 1}, columns=8, turns=2)
    for shape in ((24, 16), (16, 24)):
        own = {(each.spectrum, each.kind): each for each in matrices if each.shape == shape}
        # sum(1 / k**2) up to 16 is 1.584, of which 6 values have 94.1 % and 7 have 95.4 %.
        assert own[FALLING, EXACTLY].rank == 7 and own[FALLING, WITHIN].rank in (7, 8)
        assert own[EQUAL, EXACTLY].rank is None and own[EQUAL, WITHIN].rank is None
        assert all(len(each.seconds) == 2 and min(each.seconds) > 0 for each in own.values())
    assert svd_cost.table_of_matrices(matrices).splitlines()[1].split()[-1] == "7"


@pytest.mark.slow
@pytest.mark.usefixtures("compile_quickly")
def test_rounds_are_of_the_same_work_and_send_less(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(svd_cost, "MATRICES", {(24, 16): 6})
    monkeypatch.setattr(svd_cost, "COLUMNS", 8)
    arguments = ["--clients=2", "--examples=4", "--turns=1", f"--results={tmp_path}"]
    assert svd_cost.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    kilobytes = [float(line.split()[-1]) for line in printed[1 : 1 + len(svd_cost.KINDS)]]
    assert kilobytes[0] == pytest.approx(4 * 97.738, rel=1e-3)
    # A subspace's ranks may be larger by a little.
    assert kilobytes[1] <= kilobytes[2] * 1.001 < kilobytes[0]
    (record,) = records.newest(tmp_path)
    text = document.render([record])
    assert "### SVD in a round of FedKD" in text and "FedKD, 2 clients of 4 images" in text
    for kind, sent in zip(svd_cost.KINDS, kilobytes, strict=True):
        (cells,) = [
            line.split(" | ") for line in text.splitlines() if line.startswith(f"| {kind} |")
        ]
        assert float(cells[3].strip(" |")) == pytest.approx(sent, abs=0.1)
