"""Data sets as LightningDataModules, independent of the models.

Classes are imported on first use: `import datamodules` is cheap, and optional dependencies are
loaded only by the data sets that need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datamodules.images.folder import ImageFolder
    from datamodules.images.imagenet import ImageNet
    from datamodules.lra.image import Image
    from datamodules.lra.listops import ListOps
    from datamodules.lra.pathfinder import Pathfinder
    from datamodules.lra.retrieval import Retrieval
    from datamodules.lra.text import Text
    from datamodules.series.own import OwnSeries
    from datamodules.series.uea import UEA
    from datamodules.synthetic import Synthetic
    from datamodules.text.fine_tuning.pretraining import PretrainingText
    from datamodules.text.fine_tuning.question_answering import QuestionAnswering
    from datamodules.text.fine_tuning.text_pairs import TextPairs
    from datamodules.text.masked_text import MaskedText
    from datamodules.text.running import OwnText
    from datamodules.text.sentences.data import LM1B
    from datamodules.text.table import LabelledTexts
    from datamodules.text.translation.data import Translation
    from datamodules.text.translation.published.iwslt14 import IWSLT14
    from datamodules.text.translation.published.wmt14 import WMT14
    from datamodules.text.translation.toy import ToyTranslation
    from datamodules.text.wikitext103 import WikiText103
    from datamodules.trajectories.data import Trajectories
    from datamodules.trajectories.toy import ToyTrajectories

__all__ = ["IWSLT14", "LM1B", "REGISTRY", "UEA", "WMT14", "Image", "ImageNet"]
__all__ += ["LabelledTexts", "ListOps", "MaskedText", "OwnSeries", "OwnText", "Pathfinder"]
__all__ += ["ImageFolder", "PretrainingText", "QuestionAnswering", "Retrieval", "Synthetic"]
__all__ += [
    "Text",
    "TextPairs",
    "ToyTrajectories",
    "ToyTranslation",
    "Trajectories",
    "Translation",
    "WikiText103",
]

# Name on the command line -> module and class.
REGISTRY = {
    "image": ("datamodules.lra.image", "Image"),
    "imagenet": ("datamodules.images.imagenet", "ImageNet"),
    "iwslt14": ("datamodules.text.translation.published.iwslt14", "IWSLT14"),
    "listops": ("datamodules.lra.listops", "ListOps"),
    "lm1b": ("datamodules.text.sentences.data", "LM1B"),
    "masked_text": ("datamodules.text.masked_text", "MaskedText"),
    "own_images": ("datamodules.images.folder", "ImageFolder"),
    "own_series": ("datamodules.series.own", "OwnSeries"),
    "own_text": ("datamodules.text.running", "OwnText"),
    "own_texts": ("datamodules.text.table", "LabelledTexts"),
    "pathfinder": ("datamodules.lra.pathfinder", "Pathfinder"),
    "pretraining_text": ("datamodules.text.fine_tuning.pretraining", "PretrainingText"),
    "question_answering": (
        "datamodules.text.fine_tuning.question_answering",
        "QuestionAnswering",
    ),
    "retrieval": ("datamodules.lra.retrieval", "Retrieval"),
    "synthetic": ("datamodules.synthetic", "Synthetic"),
    "text": ("datamodules.lra.text", "Text"),
    "text_pairs": ("datamodules.text.fine_tuning.text_pairs", "TextPairs"),
    "toy_trajectories": ("datamodules.trajectories.toy", "ToyTrajectories"),
    "toy_translation": ("datamodules.text.translation.toy", "ToyTranslation"),
    "trajectories": ("datamodules.trajectories.data", "Trajectories"),
    "translation": ("datamodules.text.translation.data", "Translation"),
    "uea": ("datamodules.series.uea", "UEA"),
    "wikitext103": ("datamodules.text.wikitext103", "WikiText103"),
    "wmt14": ("datamodules.text.translation.published.wmt14", "WMT14"),
}


def __getattr__(name: str) -> type:
    for module, class_name in REGISTRY.values():
        if class_name == name:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'datamodules' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
