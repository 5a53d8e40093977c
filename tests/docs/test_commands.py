"""The commands of the documents: what they name exists, and their settings are the config's.

`test_pages.py` runs the documents' Python. Commands can take minutes, so here only their configs are
read, with the flags that the document gives.
"""

import fnmatch
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from fedcodist.cli import COMMANDS
from fedcodist.config.config_file import config_of, load_config_file, runs_of
from fedcodist.config.walk import settings_and_groups_of

ROOT = Path(__file__).parents[2]
IN_TEXT = re.compile(r"`((?:fedcodist|python -m \S+) [^`]+)`")
IN_BLOCK = re.compile(r"^```(?:text|bash)?\n(.*?)^```", re.DOTALL | re.M)
OF_A_CONFIG = {"run", "sweep", "compare", "partition", "tune"}
# What a reader puts in, and files that the same page has the reader write.
PLACEHOLDER = re.compile(r"[A-Z]{3,}|my_\w+\.py|median_digits")


def commands():
    """(page, command) of every command of the documents, without duplicates."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("datasets/**/*.md")]
    found = {}
    for path in sorted(paths):
        if path.name == "CHANGELOG.md":  # it also tells of what is gone
            continue
        text = path.read_text(encoding="utf-8")
        lines = list(IN_TEXT.findall(text))
        for block in IN_BLOCK.findall(text):
            lines += block.replace("\\\n", " ").splitlines()
        for line in lines:
            command = " ".join(line.partition("  #")[0].split())
            if command.startswith(("fedcodist ", "python -m fedcodist.")):
                found.setdefault(command, str(path.relative_to(ROOT)))
    return [pytest.param(command, id=f"{path}: {command}") for command, path in found.items()]


@pytest.mark.parametrize("command", commands())
def test_a_command_names_what_exists(command):
    words = shlex.split(command)
    if words[0] == "python":
        name = words[2].rpartition(".")[2]
        assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists() or name in COMMANDS
        arguments = words[3:]
    else:
        name, arguments = words[1], words[2:]
        assert name in COMMANDS or name.startswith("-") or PLACEHOLDER.search(name)
    if name not in OF_A_CONFIG or not arguments:
        return
    config = next((a.removeprefix("--config=") for a in arguments if "--config=" in a), None)
    if config is None and "--config" in arguments:
        config = arguments[arguments.index("--config") + 1]
    config = config or arguments[0]
    if config.startswith("-") or PLACEHOLDER.search(config) or config.startswith("runs/"):
        return
    path, _, run = config.partition(":")
    module = load_config_file(path)
    settings = dict(settings_and_groups_of(config_of(module, path, *[run] if run else [])))
    given = [a.removeprefix("--config.").split("=")[0] for a in arguments if "--config." in a]
    assert not [setting for setting in given if setting not in settings]
    patterns = [after for flag, after in pairwise(arguments) if flag == "--only"]
    runs = runs_of(module, path) if patterns else []
    assert not [pattern for pattern in patterns if not fnmatch.filter(runs, pattern)]
