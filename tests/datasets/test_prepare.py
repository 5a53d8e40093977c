"""The preparation programs, run on made-up archives in the official format and on the real files."""

import hashlib
import importlib
import io
import json
import lzma
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from fedcodist.data import load_prepared, manifest
from fedcodist.datasets import cifar, preparation
from tests.datasets.test_cifar import (
    as_archive,
    made_up_table,
    official_like,
    python2_pickle,
    read_image,
    write_folder,
)

DATASETS = Path(__file__).parents[2] / "datasets"


def program(name):
    return importlib.import_module(f"fedcodist.commands.prepare.{name}")


CIFAR10, CIFAR100 = program("cifar10"), program("cifar100")

# 600 images: 25 clients of 20 images use all 500 for training.
TRAIN, TEST = made_up_table(500, seed=1, names=b"train"), made_up_table(100, seed=2, names=b"test")
META = {b"fine_label_names": [b"apple"], b"coarse_label_names": [b"fish"]}
FILES = {
    "train": python2_pickle(TRAIN),
    "test": python2_pickle(TEST),
    "meta": python2_pickle(META),
}


def sizes(clients, per_client, train, distillation, held_out):
    values = {
        "clients": clients,
        "examples-per-client": per_client,
        "train-clients": train,
        "distillation-clients": distillation,
        "held-out-clients": held_out,
    }
    return [f"--{name}={value}" for name, value in values.items()]


SMALL = ["--accept-unverified", *sizes(25, 20, 15, 7, 3)]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "cifar-100-python.tar.gz"
    path.write_bytes(as_archive(FILES))
    return path


@pytest.fixture
def prepare(archive, tmp_path, capsys):
    """Runs the CIFAR-100 program on the made-up archive; returns status, output and errors."""

    def run(*arguments, source=archive, output=None, module=CIFAR100):
        output = tmp_path / "out" / "cifar100" if output is None else output
        size = SMALL if module is CIFAR100 else ["--accept-unverified"]
        command = ["--source", str(source), "--output", str(output), *size, *arguments]
        status = module.main(command)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def one_line(result):
    """The error of a run that failed as it should."""
    status, _, errors = result
    assert status == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1, errors
    return errors


def all_bytes(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# What is written


def test_every_image_is_in_exactly_one_place(prepare, tmp_path):
    assert prepare()[0] == 0
    splits = load_prepared(tmp_path / "out" / "cifar100")
    assert {name: (data.num_clients, data.num_examples) for name, data in splits.items()} == {
        "train": (15, 300),
        "distillation": (7, 140),
        "held_out": (3, 60),
        "test": (1, 100),
    }
    row_of = {image.tobytes(): row for row, image in enumerate(read_image(TRAIN))}
    found, clients = [], []
    for name in ("train", "distillation", "held_out"):
        data = splits[name]
        rows = [row_of[image.tobytes()] for image in data.columns["image"]]
        assert data.client_sizes.tolist() == [20] * data.num_clients
        if name != "distillation":
            labels = {"label": b"fine_labels", "coarse_label": b"coarse_labels"}
            for column, key in labels.items():
                assert data.columns[column].tolist() == [TRAIN[key][row] for row in rows]
                assert data.columns[column].dtype == np.int32
        found += rows
        clients += data.client_ids.tolist()
    assert sorted(found) == list(range(500))
    assert sorted(clients, key=int) == [str(client) for client in range(25)]
    assert list(splits["distillation"].columns) == ["image"]
    test = splits["test"]
    assert test.client_ids.tolist() == ["test"]
    np.testing.assert_array_equal(test.columns["image"], read_image(TEST))
    assert test.columns["label"].tolist() == TEST[b"fine_labels"]
    assert test.columns["coarse_label"].tolist() == TEST[b"coarse_labels"]


def test_all_clients_may_train(prepare, tmp_path):
    assert prepare(*sizes(25, 20, 25, 0, 0))[0] == 0
    splits = load_prepared(tmp_path / "out" / "cifar100")
    assert {name: data.num_examples for name, data in splits.items()} == {"train": 500, "test": 100}
    assert "label" in splits["train"].columns


def test_clients_have_few_coarse_labels(prepare, tmp_path):
    """Dirichlet(0.1) over 20 coarse labels: far fewer than the 20 draws of an even deal find."""
    prepare()
    train = load_prepared(tmp_path / "out" / "cifar100")["train"]
    kinds = [len(np.unique(client["coarse_label"])) for _, client in train.clients()]
    assert np.mean(kinds) < 8  # an even deal would find 20 * (1 - 0.95**20) = 12.8


def test_the_manifest_says_where_it_comes_from(prepare, tmp_path):
    _, printed, _ = prepare()
    content = manifest(tmp_path / "out" / "cifar100")
    arguments = content["arguments"]
    assert arguments["unverified"] is True
    assert arguments["images"] == {"train": 500, "test": 100}
    assert set(arguments["md5"]) == {"train", "test", "meta"}
    assert arguments["seed"] == 0 and arguments["clients"] == 25
    assert "Krizhevsky" in content["licence"] and "cs.toronto.edu" in content["source"]
    assert str(tmp_path) not in json.dumps(content)
    assert "UNVERIFIED: using 500 train and 100 test images all the same" in printed
    for line in ("train: 300 examples, 15 clients", "test: 100 examples, 1 client\n", ": prepared"):
        assert line in printed


def test_official_files_are_not_called_unverified(tmp_path, monkeypatch, capsys):
    folder = write_folder(tmp_path / "cifar-100-python", FILES)
    monkeypatch.setattr(cifar, "CIFAR100", official_like(cifar.CIFAR100, FILES))
    command = ["--source", str(folder), "--output", str(tmp_path / "out"), *SMALL[1:]]
    assert CIFAR100.main(command) == 0
    assert "UNVERIFIED" not in capsys.readouterr().out
    assert manifest(tmp_path / "out")["arguments"]["unverified"] is False


def test_same_seed_same_bytes_whatever_the_source(prepare, tmp_path):
    folder = write_folder(tmp_path / "cifar-100-python", FILES)
    for name, source, seed in (("a", None, "3"), ("b", folder, "3"), ("c", None, "4")):
        keywords = {} if source is None else {"source": source}
        assert prepare("--seed", seed, output=tmp_path / name, **keywords)[0] == 0
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")
    assert (
        all_bytes(tmp_path / "a")["train/image.npy"] != all_bytes(tmp_path / "c")["train/image.npy"]
    )


def test_cifar10(tmp_path, prepare):
    tables = [{b"data": table[b"data"], b"labels": [x % 10 for x in table[b"fine_labels"]]}
              for table in (made_up_table(30, seed) for seed in range(3))]  # fmt: skip
    names = ("data_batch_1", "data_batch_2", "test_batch")
    files = {name: python2_pickle(table) for name, table in zip(names, tables, strict=True)}
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.write_bytes(as_archive(files, "cifar-10-batches-py"))
    output = tmp_path / "out"
    status, printed, _ = prepare(source=archive, output=output, module=CIFAR10)
    assert status == 0
    assert "UNVERIFIED: data_batch_3 is missing" in printed
    assert "UNVERIFIED: using 60 train and 30 test images all the same" in printed
    assert manifest(output)["arguments"]["unverified"] is True
    splits = load_prepared(output)
    assert {name: data.client_ids.tolist() for name, data in splits.items()} == {
        "train": ["train"],
        "test": ["test"],
    }
    for split, expected in (("train", tables[:2]), ("test", tables[2:])):
        columns = splits[split].columns
        assert list(columns) == ["image", "label"] and columns["label"].dtype == np.int32
        np.testing.assert_array_equal(
            columns["image"], np.concatenate([read_image(table) for table in expected])
        )
        assert columns["label"].tolist() == [x for table in expected for x in table[b"labels"]]
    status, printed, _ = prepare(source=archive, output=output, module=CIFAR10)
    assert status == 0 and "nothing is left to do" in printed


# Once more


def test_a_second_run_has_nothing_to_do(prepare, tmp_path):
    prepare()
    output = tmp_path / "out" / "cifar100"
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    status, printed, _ = prepare()
    assert status == 0 and f"{output}: verified; nothing is left to do" in printed
    assert "train: 300 examples, 15 clients" in printed
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    assert [path.name for path in output.parent.iterdir()] == ["cifar100"]


def test_other_arguments_change_nothing(prepare, tmp_path):
    prepare()
    output = tmp_path / "out" / "cifar100"
    before = all_bytes(output)
    assert "other arguments: seed is 0, now it would be 1" in one_line(prepare("--seed", "1"))
    assert "split_clients['held_out'] is 3, now it would be 4" in one_line(
        prepare(*sizes(25, 20, 14, 7, 4))
    )
    other = write_folder(tmp_path / "o", {**FILES, "test": FILES["train"]})
    assert "images['test'] is 100" in one_line(prepare(source=other))
    assert all_bytes(output) == before


def test_a_damaged_folder_is_reported(prepare, tmp_path):
    prepare()
    output = tmp_path / "out" / "cifar100"
    path = output / "held_out" / "image.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    before = all_bytes(output)
    message = one_line(prepare())
    assert f"{path} differs from its sha256" in message and f"remove {output} and run" in message
    assert all_bytes(output) == before
    path.unlink()
    assert f"{path} is missing" in one_line(prepare())
    (output / "manifest.json").write_text("{}")
    assert "manifest.json is not the manifest" in one_line(prepare())


def test_a_folder_of_something_else_is_left_alone(prepare, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert "is this a prepared folder?" in one_line(prepare(output=tmp_path / "mine"))
    assert one_line(prepare(output=tmp_path / "mine" / "notes.txt"))
    assert all_bytes(tmp_path / "mine") == {"notes.txt": b"mine"}
    (tmp_path / "empty").mkdir()
    assert prepare(output=tmp_path / "empty")[0] == 0


# Killed, full, in use


RUN_WITH_FAULT = """
import os, signal, sys, runpy
from fedcodist.data import prepared
calls, fault_at = 0, int(sys.argv.pop(1))
fsync = os.fsync
def fsync_or_die(file):
    global calls
    calls += 1
    if calls == fault_at:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)
os.fsync = fsync_or_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(archive, output):
    path = str(DATASETS / "cifar100" / "prepare.py")
    return [path, "--source", str(archive), "--output", str(output), *SMALL]


@pytest.mark.parametrize("fault_at", [1, 7, 18])  # first file, in the middle, the manifest
def test_killed_while_writing_and_run_again(archive, prepare, tmp_path, fault_at):
    output = tmp_path / "killed" / "cifar100"
    killed = subprocess.run(
        [sys.executable, "-c", RUN_WITH_FAULT, str(fault_at), *command(archive, output)]
    )
    assert killed.returncode == -signal.SIGKILL
    left = [path.name for path in output.parent.iterdir()]
    assert sum(name.startswith(".cifar100.partial-") for name in left) == 1
    assert not output.exists()
    other = output.parent / ".cifar1000.partial-0"
    other.mkdir()
    assert prepare(output=output)[0] == 0
    assert {path.name for path in output.parent.iterdir()} == {"cifar100", other.name}
    prepare(output=tmp_path / "undisturbed")
    assert all_bytes(output) == all_bytes(tmp_path / "undisturbed")


def test_a_full_disk_is_one_line_and_leaves_nothing(archive, tmp_path):
    """Files may not grow beyond 100,000 bytes, where the system refuses to write on."""
    output = tmp_path / "out" / "cifar100"
    limited = subprocess.run(
        [sys.executable, *command(archive, output)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
    )
    assert limited.returncode == 2
    assert limited.stderr.startswith(f"error: {output} cannot be written: ")
    assert "is the disk full?" in limited.stderr and limited.stderr.count("\n") == 1
    assert list(output.parent.iterdir()) == []


def test_two_programs_at_once(prepare, tmp_path, monkeypatch):
    output = tmp_path / "out" / "cifar100"
    results = []
    save = preparation.save_prepared

    def save_while_another_starts(*arguments, **keywords):
        monkeypatch.setattr(preparation, "save_prepared", save)
        results.append(prepare())
        save(*arguments, **keywords)

    monkeypatch.setattr(preparation, "save_prepared", save_while_another_starts)
    assert prepare()[0] == 0
    assert "another process is preparing it" in one_line(results[0])
    assert [path.name for path in output.parent.iterdir()] == ["cifar100"]


def test_interrupted(prepare, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(CIFAR100, "dealt", interrupt)
    status, _, errors = prepare()
    assert status == 130 and errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clients", "0"], "--clients must be at least 1, got 0"),
        (["--held-out-clients", "-1"], "--held-out-clients must be at least 0, got -1"),
        (["--train-clients", "0"], "--train-clients must be at least 1, got 0"),
        (["--train-clients", "16"], "must sum to --clients 25, got 16 + 7 + 3"),
        (["--seed", "-1"], "--seed must not be negative, got -1"),
        (["--examples-per-client", "21"], "examples_per_client must be an integer in 1..20"),
        (["--tfds-dir", "x"], "--tfds-dir goes with --source tfds only"),
    ],
)
def test_arguments_that_do_not_fit(prepare, tmp_path, arguments, message):
    assert message in one_line(prepare(*arguments))
    assert not (tmp_path / "out").exists()


def test_sources_that_cannot_be_read(prepare, tmp_path, archive):
    (tmp_path / "empty").mkdir()
    short = tmp_path / "short.tar.gz"
    short.write_bytes(archive.read_bytes()[:-1000])
    line = tmp_path / "line.sqlite"
    line.write_text("not a database")
    for source, message in (
        (tmp_path / "nothing", "does not exist"),
        (tmp_path / "nothing.sqlite", "does not exist"),
        (tmp_path / "empty", "holds neither cifar-100-python/ nor"),
        (short, "cannot be read as a .tar.gz archive"),
        (line, "neither an SQLite database nor LZMA-compressed"),
    ):
        assert message in one_line(prepare(source=source))
    assert not (tmp_path / "out").exists()


def test_a_flipped_byte_is_refused(archive, tmp_path, capsys):
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    flipped = tmp_path / "cifar-100-python.tar.gz"
    flipped.write_bytes(content)
    arguments = ["--source", str(flipped), "--output", str(tmp_path / "out")]
    assert CIFAR100.main(arguments) == 2
    assert "the official cifar-100-python.tar.gz eb9058c3a382ffc7106e4002c42a8d85" in (
        capsys.readouterr().err
    )
    assert CIFAR100.main([*arguments, *SMALL]) == 2  # gzip has a checksum too
    assert not (tmp_path / "out").exists()


def test_unknown_arguments_exit_with_2(capsys):
    for arguments in ([], ["--source", "x"], ["--source", "x", "--output", "y", "--sead", "1"]):
        with pytest.raises(SystemExit) as error:
            CIFAR100.main(arguments)
        assert error.value.code == 2


# The display


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_and_a_log_plain_lines(prepare, tmp_path, monkeypatch):
    _, printed, _ = prepare()
    assert "\x1b" not in printed
    assert "preparing CIFAR-100: checking the source, cifar-100-python.tar.gz\n" in printed
    assert len(printed.splitlines()) < 25
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert prepare(output=tmp_path / "again")[0] == 0
    shown = sys.stdout.getvalue()
    assert "\x1b[" in shown and "━" in shown and "train: 300 examples, 15 clients" in shown


# TensorFlow Datasets and TensorFlow Federated


def stand_in_for_tfds(monkeypatch, tables, asked=None):
    def data_source(name, *, split, data_dir):
        if asked is not None:
            asked.append((name, split, data_dir))
        table = tables[split]
        return [
            {"id": b"x", "image": image, "label": np.int64(fine), "coarse_label": np.int64(coarse)}
            for image, fine, coarse in zip(
                read_image(table), table[b"fine_labels"], table[b"coarse_labels"], strict=True
            )
        ]

    builder = lambda name, data_dir: types.SimpleNamespace(is_prepared=lambda: True)
    module = types.SimpleNamespace(data_source=data_source, builder=builder)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)


def test_tfds_gives_what_the_archive_gives(prepare, tmp_path, monkeypatch, capsys):
    asked = []
    stand_in_for_tfds(monkeypatch, {"train": TRAIN, "test": TEST}, asked)
    output = tmp_path / "tfds"
    status, printed, _ = prepare("--tfds-dir", "/d", source="tfds", output=output)
    assert status == 0 and "UNVERIFIED" in printed
    assert asked == [("cifar100", "train", "/d"), ("cifar100", "test", "/d")]
    prepare()
    ours, theirs = all_bytes(tmp_path / "out" / "cifar100"), all_bytes(output)
    assert ours.pop("manifest.json") != theirs.pop("manifest.json")
    assert ours == theirs
    assert "nothing is left to do" in prepare(source="tfds", output=output)[1]
    assert len(asked) == 2

    command = ["--source", "tfds", "--output", str(tmp_path / "checked")]
    assert CIFAR100.main(command) == 2
    assert "split 'train' has 500 images, CIFAR-100 has 50000" in capsys.readouterr().err


def test_tfds_of_cifar10(prepare, tmp_path, monkeypatch):
    table = {**TEST, b"fine_labels": [x % 10 for x in TEST[b"fine_labels"]]}
    stand_in_for_tfds(monkeypatch, {"train": table, "test": table})
    assert prepare(source="tfds", output=tmp_path / "out", module=CIFAR10)[0] == 0
    columns = load_prepared(tmp_path / "out")["train"].columns
    np.testing.assert_array_equal(columns["image"], read_image(TEST))
    assert list(columns) == ["image", "label"] and columns["label"].dtype == np.int32


def test_tfds_that_fails(prepare, monkeypatch):
    stand_in_for_tfds(monkeypatch, {"train": {**TRAIN, b"fine_labels": [100] * 500}})
    assert "label must be in 0..99" in one_line(prepare(source="tfds"))
    stand_in_for_tfds(monkeypatch, {"train": TRAIN})
    assert "TFDS cannot read cifar100: KeyError: 'test'" in one_line(prepare(source="tfds"))
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    assert 'pip install "fedcodist[tfds]"' in one_line(prepare(source="tfds"))


def varint(value):
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number, content):
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def tf_example(**features):
    """A serialised tf.train.Example of int64 lists."""
    entries = b""
    for name, values in features.items():
        packed = field(1, b"".join(varint(int(value)) for value in np.ravel(values)))
        entries += field(1, field(1, name.encode()) + field(2, field(3, packed)))
    return field(1, entries)


def write_tff(path, clients):
    """TFF's file: (split, client id) -> rows of a table."""
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE examples "
            "(split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB)"
        )
        for (split, client), (table, rows) in clients.items():
            images = read_image(table)
            for row in rows:
                example = tf_example(
                    image=images[row],
                    label=table[b"fine_labels"][row],
                    coarse_label=table[b"coarse_labels"][row],
                )
                connection.execute(
                    "INSERT INTO examples VALUES (?, ?, ?)", (split, client, example)
                )
    connection.close()


@pytest.fixture
def tff(tmp_path):
    """(a made-up cifar100.sqlite, the arguments with the sizes of what it holds)."""
    clients = {("train", str(n)): (TRAIN, range(4 * n, 4 * n + 4)) for n in range(12)}
    clients |= {("test", str(n)): (TEST, range(5 * n, 5 * n + 5)) for n in range(3)}
    path = tmp_path / "cifar100.sqlite"
    write_tff(path, clients)
    return path, sizes(12, 4, 7, 3, 2)


def test_tff_keeps_its_own_clients(tff, prepare, tmp_path):
    path, own = tff
    output = tmp_path / "out"
    status, printed, _ = prepare(*own, source=path, output=output)
    assert status == 0 and "UNVERIFIED: the numbers of images were not checked" in printed
    splits = load_prepared(output)
    seen = {}
    for name, num_clients in (("train", 7), ("distillation", 3), ("held_out", 2)):
        assert splits[name].num_clients == num_clients
        seen |= {client: columns["image"] for client, columns in splits[name].clients()}
    for client in range(12):
        rows = slice(4 * client, 4 * client + 4)
        np.testing.assert_array_equal(seen[str(client)], read_image(TRAIN)[rows])
    client, columns = next(splits["train"].clients())
    rows = slice(4 * int(client), 4 * int(client) + 4)
    assert columns["label"].tolist() == TRAIN[b"fine_labels"][rows]
    assert columns["coarse_label"].tolist() == TRAIN[b"coarse_labels"][rows]
    assert list(splits["distillation"].columns) == ["image"]
    assert splits["test"].client_ids.tolist() == ["test"]
    np.testing.assert_array_equal(splits["test"].columns["image"], read_image(TEST)[:15])
    assert "nothing is left to do" in prepare(*own, source=path, output=output)[1]

    other = tmp_path / "other"
    line = one_line(prepare(source=path, output=other))
    assert "has 12 clients, --clients says 25" in line
    line = one_line(prepare(*own, "--examples-per-client", "5", source=path, output=other))
    assert "has clients of 4 examples, --examples-per-client says 5" in line


def test_tff_compressed_file_has_a_checksum(tff, prepare, tmp_path, monkeypatch, capsys):
    plain, own = tff
    path, output = tmp_path / "cifar100.sqlite.lzma", tmp_path / "refused"
    unverified = tmp_path / "unverified"
    content = lzma.compress(plain.read_bytes(), format=lzma.FORMAT_ALONE)
    path.write_bytes(content)
    strict = ["--source", str(path), "--output", str(output), *own]

    def refused():
        return one_line((CIFAR100.main(strict), *capsys.readouterr()))

    different = f"{path} has {len(content):,} bytes, TFF's cifar100.sqlite.lzma 153,019,920"
    assert different in refused()
    monkeypatch.setattr(CIFAR100, "TFF_BYTES", len(content))
    different = f"{path} has sha256 {hashlib.sha256(content).hexdigest()}, TFF's"
    assert different in refused() and "--accept-unverified reads it all the same" in refused()
    status, printed, _ = prepare(*own, source=path, output=unverified)
    assert status == 0
    assert f"UNVERIFIED: {different}" in printed
    assert "UNVERIFIED: the numbers of images were not checked" in printed
    assert manifest(unverified)["arguments"]["unverified"] is True

    # The official file is never recorded as unverified, and gives the same result with either flag.
    monkeypatch.setattr(CIFAR100, "TFF_SHA256", hashlib.sha256(content).hexdigest())
    assert "split 'train' has 48 images, CIFAR-100 has 50000" in refused()
    assert not output.exists()
    counts = cifar.CIFAR100._replace(images_of_split={"train": 48, "test": 15})
    monkeypatch.setattr(cifar, "CIFAR100", counts)
    for name, accepted in (("strict", []), ("accepting", ["--accept-unverified"])):
        command = ["--source", str(path), "--output", str(tmp_path / name), *own, *accepted]
        assert CIFAR100.main(command) == 0
        assert "UNVERIFIED" not in capsys.readouterr().out
        assert manifest(tmp_path / name)["arguments"]["unverified"] is False
        ours, theirs = all_bytes(tmp_path / name), all_bytes(unverified)
        assert ours.pop("manifest.json") != theirs.pop("manifest.json")
        assert ours == theirs


# The real files


@pytest.mark.slow
def test_official_cifar100(tmp_path, capsys):
    folder = os.environ.get("FEDCODIST_DATA")
    if not folder or not (Path(folder) / "cifar-100-python").is_dir():
        pytest.skip("needs the official CIFAR-100 in the folder that FEDCODIST_DATA names")
    output = tmp_path / "cifar100"
    assert CIFAR100.main(["--source", folder, "--output", str(output)]) == 0
    assert "UNVERIFIED" not in capsys.readouterr().out
    splits = load_prepared(output, verify=False)
    counts = {name: data.num_examples for name, data in splits.items()}
    assert counts == {"train": 31_500, "distillation": 13_500, "held_out": 5_000, "test": 10_000}
    for name in ("train", "distillation", "held_out"):
        assert np.all(splits[name].client_sizes == 100)
    # The deal of seed 0 must not change, as it would with other random streams in NumPy.
    digest = {"train": "947bdfa3b1b5f4c6", "distillation": "092416779a55ec8b"}
    described = manifest(output)["splits"]
    assert {split: described[split]["files"]["image"]["sha256"][:16] for split in digest} == digest
