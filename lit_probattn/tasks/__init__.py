"""LightningModules, one per kind of task; the attention variant is a constructor argument."""

from lit_probattn.tasks.base import Batch, Task
from lit_probattn.tasks.decision import DecisionMaking
from lit_probattn.tasks.fine_tuning.question_answering import QuestionAnswering
from lit_probattn.tasks.fine_tuning.text_classifier import TextClassifier
from lit_probattn.tasks.finite import NonFiniteError
from lit_probattn.tasks.image_classifier import ImageClassifier
from lit_probattn.tasks.language_model import LanguageModeling
from lit_probattn.tasks.masked_language_model import MaskedLanguageModeling
from lit_probattn.tasks.released.language_model import ReleasedLanguageModeling
from lit_probattn.tasks.sequence_classifier import PairClassifier, SequenceClassifier
from lit_probattn.tasks.series_classifier import SeriesClassifier
from lit_probattn.tasks.translation import Translation

__all__ = [
    "Batch",
    "DecisionMaking",
    "ImageClassifier",
    "LanguageModeling",
    "MaskedLanguageModeling",
    "NonFiniteError",
    "PairClassifier",
    "QuestionAnswering",
    "ReleasedLanguageModeling",
    "SequenceClassifier",
    "SeriesClassifier",
    "Task",
    "TextClassifier",
    "Translation",
]
