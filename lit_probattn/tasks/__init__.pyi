from lit_probattn.tasks.base import Batch as Batch
from lit_probattn.tasks.base import Task as Task
from lit_probattn.tasks.decision import DecisionMaking as DecisionMaking
from lit_probattn.tasks.fine_tuning.question_answering import QuestionAnswering as QuestionAnswering
from lit_probattn.tasks.fine_tuning.text_classifier import TextClassifier as TextClassifier
from lit_probattn.tasks.finite import NonFiniteError as NonFiniteError
from lit_probattn.tasks.image_classifier import ImageClassifier as ImageClassifier
from lit_probattn.tasks.language_model import LanguageModeling as LanguageModeling
from lit_probattn.tasks.masked_language_model import (
    MaskedLanguageModeling as MaskedLanguageModeling,
)
from lit_probattn.tasks.released.language_model import (
    ReleasedLanguageModeling as ReleasedLanguageModeling,
)
from lit_probattn.tasks.sequence_classifier import PairClassifier as PairClassifier
from lit_probattn.tasks.sequence_classifier import SequenceClassifier as SequenceClassifier
from lit_probattn.tasks.series_classifier import SeriesClassifier as SeriesClassifier
from lit_probattn.tasks.translation import Translation as Translation

__all__: list[str]
