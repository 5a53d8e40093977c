"""`config.metrics`: metrics beside the models' own, by the names that they have in metrics lines.

    config.metrics = dict(top_3="my_module:top_3", macro_f1="macro_f_score")

A value is a name in METRICS, or a reference to one of two things: a statistic (outputs, batch) ->
(values [batch], weights [batch]), whose weighted mean is the metric, or a `fedcodist.SummedMetric`.
Outputs are logits [batch, classes]; where a network has several heads, those of the main head. For text,
outputs are what the network returns. The functions are traced.
"""

from collections.abc import Mapping
from typing import Any

from fedcodist.config.references import choice_or_reference
from fedcodist.core import metrics as metrics_lib
from fedcodist.core.layer_outputs import logits_of, metrics_of_logits
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.models.multi_headed import HeadedOutputs, main_logits
from fedcodist.run.metrics_lines import check_metric_name

Measure = metrics_lib.Statistic | SummedMetric
METRICS: dict[str, Measure] = {
    "accuracy": metrics_lib.accuracy(),
    "top_3": metrics_lib.top_k(3),
    "top_5": metrics_lib.top_k(5),
    "precision": metrics_lib.precision(),
    "recall": metrics_lib.recall(),
    "f_score": metrics_lib.f_score(),
    "macro_f_score": metrics_lib.macro_f_score(),
    "average_precision": metrics_lib.average_precision(),
}


def with_metrics(algorithm: FederatedAlgorithm, metrics: Mapping[str, str]) -> FederatedAlgorithm:
    """The algorithm with further metrics for all of its models; training stays the same.

    Args:
      algorithm: any.
      metrics: name -> one of METRICS, or a reference.

    Raises:
      ValueError: one line that names the setting.
    """
    if not metrics:
        return algorithm
    further = metrics_of_logits({name: _chosen(name, metrics[name]) for name in metrics}, _logits)

    def extended(model: Model) -> Model:
        for name in further:
            if name in ("loss", *model.metrics):
                raise ValueError(
                    f"metrics.{name} must have another name than the model's own metrics "
                    f"{['loss', *model.metrics]}."
                )
        return model._replace(metrics={**model.metrics, **further})

    return algorithm._replace(
        predictors={
            name: predictor._replace(model=extended(predictor.model))
            for name, predictor in algorithm.predictors.items()
        },
        personal_models={
            pool: {
                name: personal._replace(model=extended(personal.model))
                for name, personal in models.items()
            }
            for pool, models in algorithm.personal_models.items()
        },
        client_models={
            pool: models._replace(
                predictors={
                    name: predictor._replace(model=extended(predictor.model))
                    for name, predictor in models.predictors.items()
                }
            )
            for pool, models in algorithm.client_models.items()
        },
    )


def _chosen(name: str, reference: str) -> Measure:
    check_metric_name(f"metrics.{name}", name)
    return choice_or_reference(f"metrics.{name}", reference, METRICS)


def _logits(outputs: Any) -> Any:
    return main_logits(outputs) if isinstance(outputs, HeadedOutputs) else logits_of(outputs)
