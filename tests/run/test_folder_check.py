"""What may become a run folder is known before anything is written or JAX is imported."""

import subprocess
import sys

import pytest

from fedcodist.run.folder_check import RunFolderError, check_folder


def test_a_new_or_empty_folder_or_a_runs_own_may(tmp_path):
    check_folder(tmp_path / "new")
    check_folder(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / ".config.json.4711").write_text('{"rou')
    check_folder(tmp_path)  # a start that was killed at once
    (tmp_path / "config.json").touch()
    (tmp_path / "thesis.tex").touch()
    check_folder(tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_file_or_a_folder_of_other_things_may_not(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match="not empty and holds no run"):
        check_folder(tmp_path)
    with pytest.raises(RunFolderError, match=r"^workdir must be a folder, .*thesis\.tex is a file"):
        check_folder(tmp_path / "thesis.tex")


def test_the_command_writes_no_logs_into_a_folder_of_other_things(tmp_path):
    (tmp_path / "thesis.tex").touch()
    command = ("-m", "fedcodist.commands.run", "--config=digits_codist", "--processes=2")
    done = subprocess.run(
        [sys.executable, *command, f"--workdir={tmp_path}"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: folder {tmp_path} is not empty and holds no run."]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
