"""Run folders: their identity, metrics that can be cut back, and their contents."""

import codecs
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedcodist.core import files
from fedcodist.run import run_folder
from fedcodist.run.folder_check import RunFolderError
from fedcodist.run.run_folder import RunFolder

CONFIG = {"rounds": 5, "pools": {"small": {"fraction": 1 / 3, "alpha": None}}, "sizes": (1, 2)}
PLAN = {"processes": 2, "loop": "scan"}


def claimed(path, config=CONFIG, plan=PLAN, change_plan=False) -> RunFolder:
    folder = RunFolder(path)
    folder.claim(config, plan, change_plan)
    return folder


def changed(**pools) -> dict:
    return CONFIG | {"pools": {"small": CONFIG["pools"]["small"] | pools}}


def test_a_new_folder_is_made_and_claimed(tmp_path):
    claimed(tmp_path / "a" / "b")
    config = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert config == CONFIG | {"sizes": [1, 2]}
    environment = json.loads((tmp_path / "a" / "b" / "environment.json").read_text())
    assert environment["plan"] == PLAN
    assert {"versions", "python", "commit", "device", "cores", "date"} <= set(environment)


def test_the_same_config_claims_it_again(tmp_path):
    claimed(tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    claimed(tmp_path / "run")
    assert (tmp_path / "run" / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        (CONFIG | {"rounds": 6}, "rounds is 5 there and 6 here"),
        (changed(alpha=0.5), "pools.small.alpha is None there and 0.5 here"),
        (changed(extra=1), "pools.small.extra is 'nothing' there and 1 here"),
        ({"rounds": 5, "sizes": (1, 2)}, r"pools is \{.*\} there and 'nothing' here"),
        (CONFIG | {"sizes": (2, 1)}, r"sizes is \[1, 2\] there and \[2, 1\] here"),
    ],
)
def test_another_config_is_refused_with_the_first_difference(config, difference, tmp_path):
    claimed(tmp_path)
    with pytest.raises(RunFolderError, match=f"another config: {difference}"):
        claimed(tmp_path, config)
    # A changed plan does not allow it.
    with pytest.raises(RunFolderError, match="another config"):
        claimed(tmp_path, config, change_plan=True)
    claimed(tmp_path)


def test_another_plan_needs_change_plan(tmp_path):
    claimed(tmp_path)
    other = PLAN | {"processes": 1}
    with pytest.raises(RunFolderError, match=r"processes is 2 there and 1 here.*--change_plan"):
        claimed(tmp_path, plan=other)
    claimed(tmp_path, plan=other, change_plan=True)
    claimed(tmp_path, plan=other)
    with pytest.raises(RunFolderError, match="processes is 1 there and 2 here"):
        claimed(tmp_path)


HOLDER = """
import sys, time
from fedcodist.run.run_folder import RunFolder
with RunFolder(sys.argv[1]) as folder:
    folder.claim({}, {}, change_plan=False)
    print("has it", flush=True)
    sys.stdin.readline()
print("left it", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the run folder `tmp_path / "run"` until it is told to leave it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate()


def in_run(tmp_path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize("end", ["killed", "left"])
def test_a_folder_that_another_process_has_is_refused_until_it_ends(end, holder, tmp_path):
    before = in_run(tmp_path)
    # Files of a run that is just starting are not mistaken for those of a stopped one.
    (tmp_path / "run" / ".summary.json.1").touch()
    for config in ({}, CONFIG):
        with pytest.raises(RunFolderError, match="is in use by another process") as caught:
            claimed(tmp_path / "run", config)
    assert str(tmp_path / "run") in str(caught.value) and "\n" not in str(caught.value)
    assert in_run(tmp_path) == before | {".summary.json.1": b""}
    if end == "killed":
        holder.kill()
        assert holder.wait(20) == -signal.SIGKILL
    else:
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "left it\n"
    claimed(tmp_path / "run", config={}, plan={})


def test_a_claim_that_failed_leaves_the_folder_free(tmp_path):
    claimed(tmp_path)
    with RunFolder(tmp_path) as folder, pytest.raises(RunFolderError, match="another config"):
        folder.claim({}, PLAN, change_plan=False)
    claimed(tmp_path)


@pytest.mark.parametrize("was_locked", [True, False])
def test_a_refused_start_leaves_the_folder_as_it_was(was_locked, tmp_path):
    with claimed(tmp_path / "run"):
        pass
    if not was_locked:
        (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".config.json.4711").touch()
    before = in_run(tmp_path)
    for config, plan in (({}, PLAN), (CONFIG, {})):
        with pytest.raises(RunFolderError, match="belongs to another"):
            claimed(tmp_path / "run", config, plan)
    assert in_run(tmp_path) == before


def test_a_start_removes_what_killed_ones_left_and_no_files_of_others(tmp_path):
    claimed(tmp_path)
    left = [".summary.json.4711", ".clients.npz.4711", ".main_seed0.safetensors.4711"]
    others = [".config.json.swp", ".notes.json.4711", ".config.json.4711.bak"]
    for name in left + others:
        (tmp_path / name).touch()
    claimed(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {*others} and not names & {*left}


def test_without_locks_nothing_is_locked(monkeypatch, tmp_path):
    monkeypatch.setattr(run_folder, "fcntl", None)
    kept = [claimed(tmp_path), claimed(tmp_path)]
    assert len(kept) == 2 and not (tmp_path / ".lock").exists()


def test_a_folder_of_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match="not empty and holds no run"):
        claimed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_an_interrupted_start_leaves_is_claimed(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / ".config.json.4711").write_text('{"rou')
    claimed(tmp_path)
    assert not list(tmp_path.glob(".*.json.*"))
    # Killed between config.json and environment.json.
    (tmp_path / "environment.json").unlink()
    claimed(tmp_path)
    assert (tmp_path / "environment.json").exists()


def test_a_file_in_its_place_is_one_line(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(RunFolderError, match="is a file"):
        claimed(tmp_path / "run")
    with pytest.raises(RunFolderError, match="cannot write"):
        claimed(tmp_path / "run" / "inside")


def test_a_config_that_cannot_be_read_is_one_line(tmp_path):
    claimed(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"cannot read .*config\.json"):
        claimed(tmp_path)


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    folder = claimed(tmp_path)
    first = folder.append_metrics([{"round": 0, "loss": 0.1}, {"round": 0, "loss": None}])
    assert first == folder.metrics.stat().st_size
    content = folder.metrics.read_bytes()
    folder.append_metrics([{"round": 1}])
    with open(folder.metrics, "a") as file:
        file.write('{"round": 2, "lo')  # what a process killed while writing leaves
    folder.keep_metrics(first)
    assert folder.metrics.read_bytes() == content
    assert folder.records() == [{"round": 0, "loss": 0.1}, {"round": 0, "loss": None}]
    assert folder.append_metrics([{"round": 1}]) == folder.metrics.stat().st_size
    folder.keep_metrics(0)
    assert folder.records() == []


@pytest.mark.parametrize("removed", [1, None])
def test_metrics_shorter_than_the_checkpoint_says_are_refused(removed, tmp_path):
    folder = claimed(tmp_path)
    length = folder.append_metrics([{"round": 0}])
    if removed is None:
        folder.metrics.unlink()
    else:
        folder.metrics.write_bytes(folder.metrics.read_bytes()[:-removed])
    with pytest.raises(RunFolderError, match=f"after {length}: it was truncated or edited"):
        folder.keep_metrics(length)


def test_no_metrics_yet(tmp_path):
    folder = claimed(tmp_path)
    folder.keep_metrics(0)
    assert folder.records() == []


def test_a_disk_that_is_full_for_metrics_is_one_line(tmp_path):
    folder = claimed(tmp_path)
    folder.metrics.mkdir()
    with pytest.raises(RunFolderError, match=r"cannot write .*metrics\.jsonl: "):
        folder.append_metrics([{"round": 0}])


def test_the_summary_is_whole_or_absent(tmp_path, monkeypatch):
    folder = claimed(tmp_path)
    folder.write_summary({"finished": True})

    def full(file, content):
        file.write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(RunFolderError, match=r"summary\.json: No space left"):
        folder.write_summary({"finished": False})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"finished": True}


def test_a_process_that_does_not_write_changes_nothing(tmp_path):
    writer = claimed(tmp_path)
    length = writer.append_metrics([{"round": 0}])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    reader = RunFolder(tmp_path, writes=False)
    assert reader.append_metrics([{"round": 1}]) == 0
    reader.keep_metrics(0)
    reader.write_summary({})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert length


def test_a_resumed_run_keeps_what_started_it(tmp_path, monkeypatch):
    for command in ("first", "second", "third"):
        monkeypatch.setattr("sys.orig_argv", ["python", command])
        plan = PLAN | {"processes": 1 if command == "first" else 2}
        RunFolder(tmp_path).claim(CONFIG, plan, command == "second")  # it may change the plan
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["command"] == "python first" and environment["plan"]["processes"] == 1
    assert [later["plan"]["processes"] for later in environment["resumed"]] == [2, 2]
    assert [later["command"] for later in environment["resumed"]] == [
        "python second",
        "python third",
    ]


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
@pytest.mark.parametrize("damage", ["{", "[1]", "7", "\udcff", "folder", "[" * 100_000])
def test_damage_is_one_line(name, damage, tmp_path):
    claimed(tmp_path)
    (tmp_path / name).unlink()
    if damage == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(damage.encode(errors="surrogateescape"))
    with pytest.raises(RunFolderError, match=f"cannot read .*{name}") as raised:
        claimed(tmp_path)
    assert "\n" not in str(raised.value)


def test_files_that_begin_with_a_byte_order_mark_are_read(tmp_path):
    with claimed(tmp_path) as folder:
        length = folder.append_metrics([{"round": 0}])
        content = folder.metrics.read_bytes()
        folder.append_metrics([{"round": 1}])
    for name in ("config.json", "environment.json", "metrics.jsonl"):
        path = tmp_path / name
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    with claimed(tmp_path) as folder:
        assert [record["round"] for record in folder.records()] == [0, 1]
        folder.keep_metrics(length)
        assert folder.metrics.read_bytes() == content


@pytest.mark.parametrize("content", ["{}", '{"plan": 3}'])
def test_an_environment_without_a_plan_is_one_line(content, tmp_path):
    claimed(tmp_path)
    (tmp_path / "environment.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"cannot read .*environment\.json: no plan"):
        claimed(tmp_path)


@pytest.mark.parametrize("damage", [b"{", b"[]", b"{}", b'{"round"', b"\xff\xfe", b"7"])
def test_metrics_that_are_no_records_are_one_line(damage, tmp_path):
    folder = claimed(tmp_path)
    folder.append_metrics([{"round": 0}])
    folder.metrics.write_bytes(folder.metrics.read_bytes() + damage + b"\n")
    with pytest.raises(RunFolderError, match=r"cannot read .*metrics\.jsonl: ") as raised:
        folder.records()
    assert "\n" not in str(raised.value)
    assert len(folder.metrics.read_bytes().splitlines()) == 2
    with pytest.raises(RunFolderError, match=r"line 1 is no record|cannot read"):
        folder.records(("round", "model"))


def test_metrics_that_are_a_folder_are_one_line(tmp_path):
    folder = claimed(tmp_path)
    folder.metrics.mkdir()
    for read in (folder.records, lambda: folder.keep_metrics(0)):
        with pytest.raises(RunFolderError, match=r"cannot (read|write) .*metrics\.jsonl"):
            read()
