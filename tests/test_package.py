"""What is written twice about the package is the same in both places."""

import re
from fnmatch import fnmatch
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_the_citation_has_the_version_and_the_five_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (version,) = re.findall(r'version="(.+?)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert citation["version"] == version
    papers = {reference["url"].rpartition("/")[2] for reference in citation["references"]}
    assert papers == {"2310.02549", "2108.13323", "2211.15774", "1910.03581", "2312.17029"}


def test_workflows_and_forms_are_yaml():
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    assert len(files) >= 5
    assert all(yaml.safe_load(path.read_text(encoding="utf-8")) for path in files)


def test_running_names_the_lowest_jax():
    """Which Colab's JAX is compared with."""
    (lowest,) = re.findall(r'"jax>=(.+?)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert f"older JAX than the {lowest} that the library needs" in page


def test_what_git_ignores_is_not_copied_into_an_image():
    """Prepared data may have many gigabytes, and may not be given to others."""
    ignored, left_out = (
        [line.strip("/") for line in (ROOT / name).read_text(encoding="utf-8").split()]
        for name in (".gitignore", ".dockerignore")
    )
    left_out = [pattern.removeprefix("**/") for pattern in left_out]
    assert len(ignored) > 8
    for name in ignored:
        assert any(fnmatch(name.replace("*", "x"), pattern) for pattern in left_out), name
