"""Pre-training as a command: it goes on where it stopped, and its file starts other models."""

import json

import jax
import numpy as np
import pytest

from fedcodist.commands import pretrain_encoder
from fedcodist.data.bert_tokens import SPECIAL, BertVocabulary
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import save_prepared
from fedcodist.datasets.piece_preparation import vocabulary_split
from fedcodist.text.bert import Encoder
from fedcodist.text.bert_weights import check_vocabulary, load_encoder
from fedcodist.text.encoder_start import first_layers, with_encoder
from fedcodist.text.sentence_classifier import sentence_classifier

pytestmark = pytest.mark.usefixtures("compile_quickly")

VOCABULARY = BertVocabulary((*SPECIAL, *"abcdefgh"))
SIZES = ["--layers=2", "--width=8", "--heads=2", "--batch-size=16", "--learning-rate=0.01"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sentences that repeat one letter."""
    texts = [" ".join(letter * 6) for letter in "abcdefgh"] * 10
    tokens = VOCABULARY.encode(texts, 9).astype(np.int32)
    tokens[3] = 0  # padding alone, such as MIND's article of no title
    data = FederatedData.from_arrays({"tokens": tokens}, offsets=[0, len(tokens)])
    path = tmp_path_factory.mktemp("data") / "letters"
    splits = {"train": data, "vocabulary": vocabulary_split(VOCABULARY)}
    save_prepared(path, splits, source="letters", licence="none", arguments={})
    return path


def command(folder, tmp_path, *more):
    output = tmp_path / "encoder.safetensors"
    paths = [f"--data={folder}", f"--workdir={tmp_path / 'run'}", f"--output={output}"]
    return [*paths, *SIZES, *more], output


@pytest.mark.slow
def test_an_encoder_is_trained_and_starts_a_teacher_and_a_student(folder, tmp_path):
    arguments, output = command(folder, tmp_path, "--epochs=6")
    assert pretrain_encoder.main(arguments) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["split"] == "held_out"]
    assert len(losses) == 7 and losses[-1] < losses[0]
    # What is left of a run that was killed at its end is a finished run.
    before = output.read_bytes()
    output.unlink()
    # The folder may be written in another way.
    again = [each.replace(f"{tmp_path / 'run'}", f"{tmp_path}/other/../run") for each in arguments]
    assert again != arguments and pretrain_encoder.main(again) == 0
    assert output.read_bytes() == before

    check_vocabulary(output, VOCABULARY.pieces)
    with pytest.raises(ValueError, match="the data's vocabulary"):
        check_vocabulary(output, VOCABULARY.pieces[::-1])
    encoder = Encoder(VOCABULARY.size, width=8, layers=2, heads=2, positions=128)
    params = load_encoder(output, encoder)
    for layers in (2, 1):
        model = sentence_classifier(encoder.clone(layers=layers))
        started = with_encoder(model, first_layers(params, layers)).init(jax.random.key(0))
        np.testing.assert_array_equal(
            started.params["encoder"]["layer0"]["query"]["kernel"],
            params["layer0"]["query"]["kernel"],
        )


def test_a_token_outside_the_vocabulary_is_one_line(tmp_path, capsys):
    tokens = np.full((40, 9), 99, np.int32)
    data = FederatedData.from_arrays({"tokens": tokens}, offsets=[0, len(tokens)])
    splits = {"train": data, "vocabulary": vocabulary_split(VOCABULARY)}
    save_prepared(tmp_path / "data", splits, source="letters", licence="none", arguments={})
    arguments, _ = command(tmp_path / "data", tmp_path)
    assert pretrain_encoder.main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--split=news"], "has no split 'news' with 'tokens'."),
        (["--heads=3"], "width must be a multiple of heads = 3, got 8."),
        (["--seed=-1"], "--seed must be at least 0, got -1."),
        (["--output=."], "--output must be a file, . is a folder."),
        (["--epochs=0"], "--epochs must be at least 1, got 0."),
        (["--learning-rate=0"], "--learning-rate must be above 0, got 0.0."),
    ],
)
def test_a_mistake_is_one_line(folder, tmp_path, capsys, more, line):
    assert pretrain_encoder.main(command(folder, tmp_path, *more)[0]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.endswith(f"{line}\n")
    assert message.count("\n") == 1 and not (tmp_path / "run").exists()
