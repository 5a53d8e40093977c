"""Means of measured bytes over the rounds between metrics lines, and a run's final metrics."""

from fedcodist.run.metrics_lines import _measured, final_metrics


def line(round, seed, value):
    return {
        "round": round,
        "model": "main",
        "split": "train",
        "seed": seed,
        "client_bytes_up": value,
    }


def test_a_line_is_the_mean_of_the_rounds_since_the_one_before():
    records = [line(1, 0, 10.0), line(4, 0, 20.0), line(4, 1, 30.0)]
    assert _measured(records, "main", "client_bytes_up", 7) == round((10 + 3 * 20 + 4 * 30) / 8)
    assert _measured(records, "other", "client_bytes_up", 7) == 7


def test_rounds_in_which_a_poisson_cohort_was_empty_are_left_out():
    records = [line(1, 0, None), line(2, 0, 10.0), line(4, 0, 40.0), line(5, 0, None)]
    assert _measured(records, "main", "client_bytes_up", 7) == round((10 + 2 * 40) / 3)
    assert _measured([line(3, 0, None)], "main", "client_bytes_up", 7) == 7


def test_lines_of_training_are_no_final_metrics():
    """Those of parties have a loss, too, and were a split `clients`."""
    of = lambda split, **metrics: {"round": 3, "model": "p", "split": split, "seed": 0, **metrics}
    records = [of("clients", loss=0.5, num_steps=4.0), of("test", loss=0.25)]
    assert final_metrics(records, 3) == {"p": {"test": {"loss": [0.25]}}}
