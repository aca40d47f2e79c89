"""What a cluster can do, measured in a minute, and what follows for an epoch with each method.

``paceline probe`` measures with a built-in task; with a model of your own, under ``paceline run``::

    found = survey.measure(model, loss, dataset, batch=64)
    for each in survey.forecasts(found):
        print(each.name, each.seconds)
"""

from paceline.survey.measure import measure
from paceline.survey.predict import Forecast, Link, Survey, forecasts, recommend

__all__ = ["Forecast", "Link", "Survey", "forecasts", "measure", "recommend"]
