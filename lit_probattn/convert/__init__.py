"""Convert trained softmax heads to heads of other variants."""

from lit_probattn.convert.layer import LayerErrors, LayerInputs, Mixture, convert_layer

__all__ = ["LayerErrors", "LayerInputs", "Mixture", "convert_layer"]
