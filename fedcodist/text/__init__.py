"""Networks, tasks and metrics for text and news."""

from fedcodist.text.attentive_pooling import AttentivePooling
from fedcodist.text.bert import Encoder, bert_base, bert_mini
from fedcodist.text.lstm import LSTMLanguageModel, haiku_lstm, large_lstm, small_lstm
from fedcodist.text.news import NewsRecommender, news_recommender
from fedcodist.text.sentence_classifier import SentenceClassifier, sentence_classifier
from fedcodist.text.sentence_encoders import ConvolutionEncoder, LSTMEncoder, SelfAttentionEncoder
from fedcodist.text.transformer import Transformer, large_transformer, small_transformer

__all__ = [
    "AttentivePooling",
    "ConvolutionEncoder",
    "Encoder",
    "LSTMEncoder",
    "LSTMLanguageModel",
    "NewsRecommender",
    "SelfAttentionEncoder",
    "SentenceClassifier",
    "Transformer",
    "bert_base",
    "bert_mini",
    "haiku_lstm",
    "large_lstm",
    "large_transformer",
    "news_recommender",
    "sentence_classifier",
    "small_lstm",
    "small_transformer",
]
