"""BERT's files: round trips, names, tensors that are left out, and errors for files that do not fit.

Whether `transformers` computes the same from such a file is compared by a slow test, which needs that
package and torch in an environment of their own (BUILD.md says how).
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from fedcodist.data.bert_tokens import BertVocabulary
from fedcodist.text.bert import Encoder, bert_mini
from fedcodist.text.bert_weights import (
    VOCABULARY,
    check_vocabulary,
    load_encoder,
    save_encoder,
    stored_encoder,
    vocabulary_checksum,
)
from fedcodist.text.encoder_start import first_layers
from fedcodist.text.encoder_units import narrowed

pytestmark = pytest.mark.usefixtures("compile_quickly")

SMALL = Encoder(vocabulary=11, width=8, layers=2, heads=2, positions=12)


def noisy(network=SMALL):
    params = network.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    noise = np.random.default_rng(0)
    add = lambda leaf: np.asarray(leaf + 0.1 * noise.normal(size=leaf.shape), np.float32)
    return jax.tree.map(add, params)


def test_parameters_come_back_under_any_of_berts_names(tmp_path):
    params, file, other = noisy(), tmp_path / "encoder", tmp_path / "other"
    save_encoder(file, params)
    jax.tree.map(np.testing.assert_array_equal, load_encoder(file, SMALL), params)
    tensors = safetensors.numpy.load_file(file)
    assert len(tensors) == 5 + 16 * 2
    np.testing.assert_array_equal(
        tensors["bert.encoder.layer.1.intermediate.dense.weight"],
        params["layer1"]["inner"]["kernel"].T,
    )
    np.testing.assert_array_equal(
        tensors["bert.embeddings.word_embeddings.weight"], params["embeddings"]["words"]
    )
    rename = lambda name: name.removeprefix("bert.").replace("Norm.weight", "Norm.gamma")
    others = {rename(name): tensor.astype(np.float64) for name, tensor in tensors.items()}
    for head in ("pooler.dense.weight", "bert.pooler.dense.bias", "cls.predictions.bias"):
        others[head] = np.zeros(3)
    others["bert.embeddings.position_ids"] = np.arange(12)
    others["qa_outputs.bias"] = np.zeros(2, np.float32)
    safetensors.numpy.save_file(others, other)
    found = load_encoder(other, SMALL)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found))


def test_a_file_tells_its_encoder(tmp_path):
    file, other = tmp_path / "encoder", tmp_path / "other"
    save_encoder(file, noisy(), {"heads": "2"})
    assert stored_encoder(file, heads=2) == SMALL
    with pytest.raises(ValueError, match=r"encoder is of an encoder of 2 heads, got one of 4\.$"):
        stored_encoder(file, heads=4)
    tensors = safetensors.numpy.load_file(file)
    plain = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    safetensors.numpy.save_file(plain, other)  # as published, without a note of heads
    assert stored_encoder(other, heads=4) == SMALL.clone(heads=4)
    safetensors.numpy.save_file({"classes.weight": np.zeros((2, 3), np.float32)}, other)
    with pytest.raises(ValueError, match=r"other has no table embeddings\.word_embeddings\.weight"):
        stored_encoder(other, heads=2)
    with pytest.raises(ValueError, match=r"^cannot read an encoder from .*nothing.*\.$"):
        stored_encoder(tmp_path / "nothing", heads=2)


def test_a_file_tells_its_vocabulary(tmp_path):
    """Shapes are the same for every vocabulary of a size, and for every order of its pieces."""
    file, pieces = tmp_path / "encoder", [f"piece {number}" for number in range(11)]
    save_encoder(file, noisy(), {"heads": "2"})
    check_vocabulary(file, pieces)  # it does not say
    save_encoder(file, noisy(), {"heads": "2", VOCABULARY: vocabulary_checksum(pieces)})
    check_vocabulary(file, pieces)
    for other in (pieces[::-1], [*pieces[:-1], "other"], pieces[:-1], ["".join(pieces)]):
        with pytest.raises(ValueError, match=r"encoder must be of an encoder of the data's vocab"):
            check_vocabulary(file, other)


def test_a_vocabularys_checksum_is_that_of_its_file(tmp_path):
    vocabulary = BertVocabulary(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "é", "##a"))
    vocabulary.save(tmp_path / "vocab.txt")
    checksum = hashlib.sha256((tmp_path / "vocab.txt").read_bytes()).hexdigest()
    assert vocabulary_checksum(vocabulary.pieces) == checksum


def test_a_file_tells_its_narrowed_encoder(tmp_path):
    file, encoder = tmp_path / "encoder", narrowed(SMALL, 0.5)
    params = noisy(encoder)
    save_encoder(file, params)
    found = stored_encoder(file, heads=1)
    assert found == encoder and (found.head_width, found.inner_width) == (4, 16)
    jax.tree.map(np.testing.assert_array_equal, load_encoder(file, found), params)
    with pytest.raises(
        ValueError, match=r"encoder: heads must divide its attention's 4 rows, got 3\.$"
    ):
        stored_encoder(file, heads=3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.full(8, np.nan, np.float32), r"NAME must be finite\.$"),
        (np.full(8, np.inf, np.float32), r"NAME must be finite\.$"),
        (np.zeros(8, np.int8), r"NAME must be of floats, got int8\.$"),
    ],
)
def test_numbers_that_are_no_weights_are_one_line(value, message, tmp_path):
    params, file = noisy(), tmp_path / "encoder"
    params["embeddings"]["norm"]["bias"] = value
    save_encoder(file, params)
    message = message.replace("NAME", r"embeddings\.LayerNorm\.bias")
    with pytest.raises(ValueError, match=rf"encoder: tensor {message}"):
        load_encoder(file, SMALL)


def test_a_file_that_does_not_fit_is_one_line(tmp_path):
    file = tmp_path / "encoder"
    save_encoder(file, first_layers(noisy(), 1))
    missing = r"encoder has no tensor encoder\.layer\.1\.\S+, which the encoder needs\.$"
    with pytest.raises(ValueError, match=missing):
        load_encoder(file, SMALL)
    save_encoder(file, noisy())
    extra = r"encoder has tensor encoder\.layer\.1\.attention\S+, which the encoder has not\.$"
    with pytest.raises(ValueError, match=extra):
        load_encoder(file, SMALL.clone(layers=1))
    shape = r"tensor embeddings\.word_embeddings\.weight must be \[12, 8\], got \[11, 8\]\.$"
    with pytest.raises(ValueError, match=shape):
        load_encoder(file, SMALL.clone(vocabulary=12))
    file.write_bytes(file.read_bytes()[:-5])
    for wrong in (file, tmp_path / "nothing"):
        with pytest.raises(ValueError, match=r"^cannot read an encoder from .*\.$"):
            load_encoder(wrong, SMALL)


@pytest.mark.slow
def test_transformers_computes_the_same(tmp_path):
    reason = "needs torch and transformers: see 'BERT beside transformers' in BUILD.md"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    network = bert_mini(300, layers=3)
    sizes = dict(vocab_size=300, hidden_size=256, num_hidden_layers=3, num_attention_heads=4)
    options = dict(intermediate_size=1024, attn_implementation="eager")
    peer = transformers.BertModel(transformers.BertConfig(**sizes, **options)).eval()
    draw = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += torch.tensor(0.1 * draw.normal(size=parameter.shape), dtype=torch.float32)
    peer.save_pretrained(tmp_path)
    tokens = draw.integers(1, 300, (4, 24))
    kinds = draw.integers(0, 2, tokens.shape)
    for row, length in zip(tokens, (24, 17, 3, 1), strict=True):
        row[length:] = 0
    is_real = tokens != 0

    def compare(params, tolerance):
        found = network.apply({"params": params}, tokens, kinds)
        arguments = [torch.tensor(each) for each in (tokens, is_real.astype(int), kinds)]
        with torch.no_grad():
            expected = peer(
                *arguments, output_hidden_states=True, output_attentions=True, return_dict=True
            )
        assert len(found.hidden) == len(expected.hidden_states) - 1 == 3
        for own, other in zip(found.hidden, expected.hidden_states[1:], strict=True):
            np.testing.assert_allclose(own[is_real], other.numpy()[is_real], **tolerance)
        for own, other in zip(found.attention, expected.attentions, strict=True):
            heads_last = lambda each: np.moveaxis(np.asarray(each), 1, -1)[is_real]
            np.testing.assert_allclose(heads_last(own), heads_last(other), **tolerance)

    params = load_encoder(tmp_path / "model.safetensors", network)
    compare(params, dict(rtol=1e-3, atol=2e-5))
    with jax.enable_x64(True):
        peer.double()
        compare(jax.tree.map(np.float64, params), dict(rtol=1e-9, atol=1e-10))
    # And back: transformers loads what is saved here.
    save_encoder(tmp_path / "model.safetensors", params)
    read = transformers.BertModel.from_pretrained(tmp_path).state_dict()
    for name, tensor in peer.float().state_dict().items():
        if "pooler" not in name:
            np.testing.assert_array_equal(read[name], tensor, err_msg=name)


@pytest.mark.slow
def test_transformers_reads_text_as_the_same_tokens(tmp_path):
    reason = "needs transformers: see 'BERT beside transformers' in BUILD.md"
    transformers = pytest.importorskip("transformers", reason=reason)
    texts = ["Don't panic: the café's OPEN!", "naïve 東京 tweets 😀 @user #tag http://t.co/x", ""]
    vocabulary = BertVocabulary.learn(texts[:1] * 2 + ["tweets at the café http://t.co"], 60)
    vocabulary.save(tmp_path / "vocab.txt")
    peer = transformers.BertTokenizerFast.from_pretrained(tmp_path)
    for length in (5, 64):
        expected = peer(texts, max_length=length, truncation=True, padding="max_length")
        found = vocabulary.encode(texts, length)
        np.testing.assert_array_equal(found, expected["input_ids"])
        np.testing.assert_array_equal(found != 0, expected["attention_mask"])
