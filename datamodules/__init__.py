"""Data sets as LightningDataModules, independent of the models.

Classes, listed in `__init__.pyi`, are imported on first use: `import datamodules` is cheap, and
optional dependencies are loaded only by the data sets that need them.
"""

from lit_probattn.base.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)

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
