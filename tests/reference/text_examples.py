"""A small encoder, and sentences and impressions of news with padding and missing candidates."""

import numpy as np

from fedcodist.text.bert import Encoder

ENCODER = Encoder(vocabulary=11, width=8, layers=2, heads=2, positions=12)
SENTENCES = {
    "tokens": np.array([[2, 7, 5, 9, 3], [2, 8, 3, 0, 0], [0, 0, 0, 0, 0]]),
    "label": np.array([1, 0, 2]),
}
IMPRESSIONS = {
    "candidates": np.array([[[2, 7, 3], [4, 0, 0], [0, 0, 0]], [[5, 6, 0], [9, 1, 1], [3, 2, 0]]]),
    "history": np.array([[[8, 3, 0], [0, 0, 0], [1, 4, 2], [9, 9, 0]], [[0, 0, 0]] * 4]),
    "label": np.array([1, 2]),
}
