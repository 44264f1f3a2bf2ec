"""The models whose cost is measured; they also run on the meta device.

One attention layer, the papers' language model, the classifier of the Long Range Arena, its pair
classifier, and the encoder-decoder of translation. Inputs are random, since cost does not depend on
them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from lit_probattn.attention import AttentionFactory
from lit_probattn.models import language_model
from lit_probattn.models.classifiers import Classifier, PairClassifier
from lit_probattn.models.encoder_decoder import EncoderDecoder
from lit_probattn.models.heads import PairClassifierHead, pool
from lit_probattn.randomness import RandomKey


class AttentionOnly(nn.Module):
    """A single attention layer as a model; the input is the only argument."""

    def __init__(self, layer: nn.Module, is_causal: bool = False) -> None:
        super().__init__()
        self.layer, self.is_causal = layer, is_causal

    @classmethod
    def build(
        cls, attention: AttentionFactory, *, embed_dim: int, head_dim: int, is_causal: bool
    ) -> AttentionOnly:
        """Build the layer and the model."""
        return cls(attention(embed_dim, head_dim=head_dim), is_causal)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        out: Tensor = self.layer(inputs, is_causal=self.is_causal, rng=RandomKey(0))
        return out


class LanguageModel(nn.Module):
    """The decoder of the WikiText-103 experiments; token ids are the only argument.

    All words of all clusters are evaluated, so that the cost does not depend on the targets.
    `attention` determines whether attention has biases and dropout.

    Source: MGK, ICML 2022, appendix A.1.2: post-norm blocks, causal attention without biases,
    ReLU feed-forward, embedding scaled by √C, fixed sinusoids, tied adaptive softmax.

    Args:
        is_causal: use a causal mask. Counting disables it, because the papers' counts ignore it
            and backends that skip masked blocks would differ.
        options: further arguments of `lit_probattn.models.language_model.LanguageModel`.
    """

    def __init__(
        self,
        attention: AttentionFactory,
        *,
        is_causal: bool = True,
        include_output_layer: bool = True,
        vocab_size: int = 267735,
        **options: Any,
    ) -> None:
        super().__init__()
        self.is_causal, self.include_output_layer = is_causal, include_output_layer
        options |= {"vocab_size": vocab_size, "attention_bias": None, "attention_dropout": None}
        self.model = language_model.LanguageModel(attention, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return log-probabilities (B, N, vocab_size) of tokens (B, N)."""
        x = self.model.embed(inputs)  # (B, N, C)
        x = self.model.encoder(x, is_causal=self.is_causal, rng=RandomKey(0))
        x = self.model.dropout(x)
        return self.model.log_probs(x) if self.include_output_layer else x


class SequenceModel(nn.Module):
    """The classifier of the Long Range Arena; token ids are the only argument."""

    def __init__(self, attention: AttentionFactory, **options: Any) -> None:
        super().__init__()
        self.classifier = Classifier(attention, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of tokens (B, N)."""
        logits: Tensor = self.classifier(inputs, rng=RandomKey(0))
        return logits


class PairModel(nn.Module):
    """The retrieval model; the encoder is called once per text, as in its base code."""

    def __init__(self, attention: AttentionFactory, **options: Any) -> None:
        super().__init__()
        self.classifier = PairClassifier(attention, **options)

    def encode(self, text: Tensor) -> Tensor:
        """Encode and pool one text of each pair, (B, N) -> (B, C)."""
        embedded = self.classifier.embedding(text)  # (B, N, C)
        x = self.classifier.encoder(embedded, rng=RandomKey(0))
        return pool(x, None, "mean", text.shape[1])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, classes) of pairs of texts (B, 2, N)."""
        first, second = (self.encode(text) for text in inputs.unbind(1))
        feature = torch.cat([first, second, first * second, first - second], -1)  # (B, 4C)
        head = cast(PairClassifierHead, self.classifier.head)
        logits: Tensor = head.fc2(torch.relu(head.fc1(feature)))
        return logits


class TranslationModel(nn.Module):
    """The encoder-decoder of translation; source and target tokens of equal length.

    `attention` creates self-attention of encoder and decoder and cross-attention, and determines
    whether they have biases and dropout.

    Source: FiSH, NeurIPS 2022, figure 4 and appendix A.4: fairseq's `transformer_iwslt_de_en`.

    Args:
        is_causal: use a causal mask for the target; see `LanguageModel`.
        include_output_layer: evaluate all words.
        vocab_size: number of words of source and target.
        num_layers: number of blocks of encoder and decoder.
        options: further arguments of `EncoderDecoder`.
    """

    def __init__(
        self,
        attention: AttentionFactory,
        *,
        is_causal: bool = True,
        include_output_layer: bool = True,
        vocab_size: int,
        num_layers: int,
        **options: Any,
    ) -> None:
        super().__init__()
        self.is_causal, self.include_output_layer = is_causal, include_output_layer
        options |= {"num_encoder_layers": num_layers, "num_decoder_layers": num_layers}
        options |= {"source_vocab_size": vocab_size, "vocab_size": vocab_size}
        options |= {"attention_bias": None, "attention_dropout": None}
        self.model = EncoderDecoder(attention, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, N, vocab_size) of source and target tokens (B, 2, N)."""
        source, target = inputs.unbind(1)
        memory = self.model.encode(source, rng=RandomKey(0))  # (B, N, C)
        x = self.model.decode(target, memory, rng=RandomKey(0), is_causal=self.is_causal)
        return self.model.logits(x) if self.include_output_layer else x
