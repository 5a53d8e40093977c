"""Metrics as one line of text."""

from fedcodist.run.metrics_text import current_text, final_text


def line(model, split, seed=0, **metrics):
    return {"round": 3, "model": model, "split": split, "seed": seed, **metrics}


def test_the_split_is_named_and_seeds_are_averaged():
    records = [
        line("small", "held_out", accuracy=0.8),
        line("small", "held_out", 1, accuracy=0.9),
        line("large", "held_out", accuracy=0.7, loss=1.0),
        line("small", "test", accuracy=0.1),
    ]
    assert current_text(records) == "held-out accuracy: small 85.0 % · large 70.0 %"


def test_without_an_accuracy_it_is_the_loss_and_without_either_nothing():
    assert current_text([line("main", "test", loss=2.5)]) == "test loss: main 2.500"
    assert current_text([line("main", "test", auc=0.5)]) == ""
    # The first split that has one of them.
    records = [line("main", "a", auc=0.5), line("main", "b", accuracy=0.5)]
    assert current_text(records) == "b accuracy: main 50.0 %"


def test_what_is_undefined_is_a_dash():
    for value in (None, float("nan")):
        records = [line("small", "test", accuracy=value), line("large", "test", accuracy=0.5)]
        assert current_text(records) == "test accuracy: small - · large 50.0 %"


def test_many_models_are_a_mean_and_the_extremes():
    records = [line(f"party_{i}", "test", accuracy=i / 20) for i in range(20)]
    records.append(line("party_20", "test", accuracy=None))
    assert current_text(records) == "test accuracy: mean of 20 models 47.5 % (0.0 % to 95.0 %)"


def test_final_numbers_tell_seeds_and_the_splits_that_are_asked_for():
    final = {
        "small": {"held_out": {"accuracy": [0.1, 0.1]}, "test": {"accuracy": [0.5, 0.6]}},
        "large": {"test": {"accuracy": [0.7, None]}},
    }
    text = "test accuracy, mean of 2 seeds: small 55.0 % · large -"
    assert final_text(final, ["test"]) == text
    both = "held-out accuracy, mean of 2 seeds: small 10.0 %; "
    assert final_text(final, ["held_out", "test"]) == both + text
    assert final_text({"main": {"test": {"loss": [1.0]}}}, ["test"]) == "test loss: main 1.000"
    assert final_text(final, ["elsewhere"]) == ""
