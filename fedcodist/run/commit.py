"""The commit of this repository that runs."""

import subprocess
from pathlib import Path


def running_commit() -> str | None:
    """The commit's 40 digits, with "-dirty" if files differ from it; None outside a repository."""
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return git.stdout.strip()
