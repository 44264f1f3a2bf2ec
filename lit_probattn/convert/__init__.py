"""From trained softmax heads to heads with mixtures of keys."""

from lit_probattn.convert.inputs import LayerErrors, LayerInputs
from lit_probattn.convert.layer import convert_layer

__all__ = ["LayerErrors", "LayerInputs", "convert_layer"]
