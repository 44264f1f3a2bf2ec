"""From trained softmax heads to heads with mixtures of keys."""

from lit_probattn.convert.layer import LayerErrors, LayerInputs, convert_layer

__all__ = ["LayerErrors", "LayerInputs", "convert_layer"]
