"""The built-in jobs: a data set, models for it, a loss and an evaluation.

>>> from paceline import tasks
>>> task = tasks.load("digits")
>>> model = task.model("mlp", seed=1)
>>> sorted(task.evaluate(model))
['accuracy', 'loss']

``digits`` comes with scikit-learn (``pip install paceline[tasks]``). The others read files from the folder
that the environment variable ``PACELINE_DATA`` names; nothing is ever downloaded.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.tasks import cifar10, digits, fashion_mnist, multi30k, sst2, tinyshakespeare
from paceline.tasks.images import Images
from paceline.tasks.models import MLP, CharTransformer, LeNet, ResNet, Words
from paceline.tasks.task import Task, choose
from paceline.tasks.translator import Translator

__all__ = ["MLP", "CharTransformer", "Images", "LeNet", "ResNet", "Task", "Translator", "Words", "load", "names"]

_LOADERS: dict[str, Callable[[], Task]] = {
    "digits": digits.load,
    "fashion-mnist": fashion_mnist.load,
    "cifar10": cifar10.load,
    "sst2": sst2.load,
    "tinyshakespeare": tinyshakespeare.load,
    "multi30k": multi30k.load,
}


def names() -> list[str]:
    """The tasks that :func:`load` knows."""
    return list(_LOADERS)


def load(name: str) -> Task:
    """The task of this name, with its data in memory.

    Raises :class:`~paceline.errors.SettingError` for a name that is not known and
    :class:`~paceline.errors.DataMissing` where its data are not on this machine or damaged.
    """
    return choose("task", name, _LOADERS)()
