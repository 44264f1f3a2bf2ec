"""One label per pair of texts: Retrieval of the Long Range Arena."""

from collections.abc import Callable
from typing import ClassVar

from torch import nn

from lit_probattn.models.classifiers import PairClassifier as PairModel
from lit_probattn.tasks.sequence_classifier import SequenceClassifier


class PairClassifier(SequenceClassifier):
    """One encoder for both texts of a pair, and a head that compares them.

    Batches have `inputs` and `key_mask` of shape (B, 2, N). Both texts go through the encoder in
    one call of 2 B sequences; for attention dropout, noise and random features, the texts of
    sample i are samples 2 i and 2 i + 1, so that their draws differ. Priors that follow an M-step
    (setting B) are updated once per optimiser step, from both texts of all pairs of that step.

    Everything else, arguments and logged values included, is as in SequenceClassifier.

    Source: MGK, ICML 2022, Retrieval set-up on the Long Range Arena (spec d.2, h-26).
    Departs from the source: one M-step per optimiser step instead of one per text; whole validation
    and test sets are scored, each pair once.
    """

    model_class: ClassVar[Callable[..., nn.Module]] = PairModel
