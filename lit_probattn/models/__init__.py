"""Models: single-device code that takes its attention as an argument."""

from lit_probattn.models.classifiers import Classifier, PairClassifier

__all__ = ["Classifier", "PairClassifier"]
