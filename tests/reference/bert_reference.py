"""BERT's encoder, attentive pooling and the news model as loops in float64, sentence by sentence."""

import math

import numpy as np


def encode(params, tokens, heads):
    """(hidden, attention) of one sentence, one [length, width] and [heads, length, length] a layer."""
    tables = params["embeddings"]
    x = [
        normalised(tables["words"][token] + tables["positions"][place] + tables["types"][0], tables)
        for place, token in enumerate(tokens)
    ]
    real = [place for place, token in enumerate(tokens) if token]
    hidden, attention = [], []
    for number in range(len(params) - 1):
        layer = params[f"layer{number}"]
        x, shares = one_layer(layer, x, real, heads)
        hidden.append(np.stack(x))
        attention.append(shares)
    return hidden, attention


def one_layer(layer, x, real, heads):
    size = len(x[0]) // heads
    query, key, value = (
        [dense(layer[name], row) for row in x] for name in ("query", "key", "value")
    )
    shares = np.zeros((heads, len(x), len(x)))
    after = []
    for now in range(len(x)):
        heard = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = [query[now][part] @ key[place][part] / math.sqrt(size) for place in real]
            # Padding alone attends to itself evenly.
            shares[head, now, real or slice(None)] = softmax(scores) if real else 1 / len(x)
            heard.append(shares[head, now] @ np.stack(value)[:, part])
        heard = dense(layer["attention_output"], np.concatenate(heard))
        middle = normalised(x[now] + heard, {"norm": layer["attention_norm"]})
        inner = np.array([gelu(each) for each in dense(layer["inner"], middle)])
        after.append(normalised(middle + dense(layer["output"], inner), layer))
    return after, shares


def pooled(params, rows, real):
    """The mean of rows weighted by a softmax of query tanh(W row + b); zeros of no real row."""
    kept = [row for row, is_real in zip(rows, real, strict=True) if is_real]
    if not kept:
        return np.zeros_like(rows[0])
    scores = [np.tanh(dense(params["projection"], row)) @ params["query"] for row in kept]
    return sum(share * row for share, row in zip(softmax(scores), kept, strict=True))


def softmax(scores):
    powers = np.exp(np.array(scores) - max(scores))
    return powers / powers.sum()


def dense(params, row):
    return row @ params["kernel"] + params["bias"]


def normalised(row, owner):
    centred = row - row.mean()
    unit = centred / math.sqrt((centred**2).mean() + 1e-12)
    return unit * owner["norm"]["scale"] + owner["norm"]["bias"]


def gelu(value):
    return value * (1 + math.erf(value / math.sqrt(2))) / 2
