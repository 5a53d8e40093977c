"""Networks of the reproduced papers and the layers they are made of."""

from fedcodist.models.cnn import CNN, large_cnn, small_cnn
from fedcodist.models.convolution import conv3x3, max_pool_2x2
from fedcodist.models.digits import MLP, BatchNormMLP, large_digits, small_digits
from fedcodist.models.emnist import EMNISTCNN, emnist_cnn
from fedcodist.models.fed_md import FedMDNetwork, FullyConnected
from fedcodist.models.normalization import BatchNorm
from fedcodist.models.normalized_cnn import NormalizedCNN
from fedcodist.models.resnet import (
    ResNet,
    WideResNet,
    resnet8,
    resnet20,
    resnet56,
    wide_resnet16_2,
)
from fedcodist.text.attentive_pooling import AttentivePooling
from fedcodist.text.bert import Encoder, bert_base, bert_mini
from fedcodist.text.lstm import LSTMLanguageModel, haiku_lstm, large_lstm, small_lstm
from fedcodist.text.news import NewsRecommender, news_recommender
from fedcodist.text.sentence_classifier import SentenceClassifier, sentence_classifier
from fedcodist.text.transformer import Transformer, large_transformer, small_transformer

__all__ = [
    "CNN",
    "EMNISTCNN",
    "MLP",
    "AttentivePooling",
    "BatchNorm",
    "BatchNormMLP",
    "Encoder",
    "FedMDNetwork",
    "FullyConnected",
    "LSTMLanguageModel",
    "NewsRecommender",
    "NormalizedCNN",
    "ResNet",
    "SentenceClassifier",
    "Transformer",
    "WideResNet",
    "bert_base",
    "bert_mini",
    "conv3x3",
    "emnist_cnn",
    "haiku_lstm",
    "large_cnn",
    "large_digits",
    "large_lstm",
    "large_transformer",
    "max_pool_2x2",
    "news_recommender",
    "resnet8",
    "resnet20",
    "resnet56",
    "sentence_classifier",
    "small_cnn",
    "small_digits",
    "small_lstm",
    "small_transformer",
    "wide_resnet16_2",
]
