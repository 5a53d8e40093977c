"""Records with earlier names are read as if they had the present ones."""

import copy
import json
from pathlib import Path

from experiments.studies.renamed import SETTINGS, renamed
from experiments.studies.settings import flat

RESULTS = Path(__file__).parents[3] / "results"


def test_methods_settings_phases_and_runs():
    record = {
        "run": "pooled_longer,s=0",
        "command": "python -m experiments.main --config=a/b.py:larger,separate --workdir=runs/separate",
        "phases": {"pooled": {"a": 1}, "private": {}},
        "config": {
            "run": "pooled_longer,s=0",
            "algorithm": {"name": "isolated", "pool_size": 3, "epochs": 1},
            "phases": {"pooled": {"epochs": 2}, "pooled_bound": True, "public": {"epochs": 3}},
            "training": {
                "fetch_sgd": {"rows": 1, "columns": 2, "count": 3, "examples": 4, "momentum": 0.9},
                "compression": {"rows": 1, "columns": 2, "count": 3},
            },
        },
    }
    before = copy.deepcopy(record)
    assert renamed(record) == {
        "run": "centralised_longer,s=0",
        "command": "python -m experiments.main --config=a/b.py:larger,local_only_steps "
        "--workdir=runs/separate",
        "phases": {"centralised": {"a": 1}, "private": {}},
        "config": {
            "run": "centralised_longer,s=0",
            "algorithm": {"name": "local_only", "checkpoints_per_client": 3, "epochs": 1},
            "phases": {
                "centralised": {"epochs": 2},
                "centralised_bound": True,
                "public": {"epochs": 3},
            },
            "training": {
                "fetch_sgd": {
                    "sketch_rows": 1,
                    "sketch_columns": 2,
                    "k": 3,
                    "examples_per_round": 4,
                    "momentum": 0.9,
                },
                "compression": {"rows": 1, "columns": 2, "count": 3},
            },
        },
    }
    assert record == before and renamed(renamed(record)) == renamed(record)
    assert renamed({"run": 3, "config": None}) == {"run": 3, "config": None}


def test_no_record_keeps_a_name_of_before():
    for path in RESULTS.glob("cifar*/*.json"):
        config = renamed(json.loads(path.read_text()))["config"]
        old = [name for name in flat(config) if name.startswith(tuple(SETTINGS))]
        assert all(name.startswith(tuple(SETTINGS.values())) for name in old), (path, old)
        assert config["algorithm"]["name"] not in ("isolated", "separate", "pooled")
