"""The public names of this package and their modules, one line per variant."""

from lit_probattn.attention.ast import ASTAttention as ASTAttention
from lit_probattn.attention.backends import attend as attend
from lit_probattn.attention.backends import recorded_choices as recorded_choices
from lit_probattn.attention.cache import Cache as Cache
from lit_probattn.attention.cache import KVCache as KVCache
from lit_probattn.attention.cache import LinearState as LinearState
from lit_probattn.attention.cache import Memory as Memory
from lit_probattn.attention.call import HeadCall as HeadCall
from lit_probattn.attention.call import HeadLayout as HeadLayout
from lit_probattn.attention.core import Core as Core
from lit_probattn.attention.cost.counting import Cost as Cost
from lit_probattn.attention.fish.layer import FiSHAttention as FiSHAttention
from lit_probattn.attention.fish.linear_layer import LinearFiSHAttention as LinearFiSHAttention
from lit_probattn.attention.layer import Attention as Attention
from lit_probattn.attention.layer import AttentionFactory as AttentionFactory
from lit_probattn.attention.linear.layer import LinearAttention as LinearAttention
from lit_probattn.attention.linear.mlk import MLKAttention as MLKAttention
from lit_probattn.attention.mgk.layer import MGKAttention as MGKAttention
from lit_probattn.attention.own.related import DCMHAttention as DCMHAttention
from lit_probattn.attention.own.related import DifferentialAttention as DifferentialAttention
from lit_probattn.attention.own.related import EllipticalAttention as EllipticalAttention
from lit_probattn.attention.own.related import GatedAttention as GatedAttention
from lit_probattn.attention.own.related import ParallaxAttention as ParallaxAttention
from lit_probattn.attention.own.related import TalkingHeadsAttention as TalkingHeadsAttention
from lit_probattn.attention.polynomial import PolynomialAttention as PolynomialAttention
from lit_probattn.attention.released.linear import (
    ReleasedLinearAttention as ReleasedLinearAttention,
)
from lit_probattn.attention.released.linear import ReleasedMLKAttention as ReleasedMLKAttention
from lit_probattn.attention.released.mgk import ReleasedMGKAttention as ReleasedMGKAttention
from lit_probattn.attention.softmax import SoftmaxAttention as SoftmaxAttention
from lit_probattn.attention.variant import Variant as Variant

__all__: list[str]

def variants() -> dict[str, type[Attention]]: ...
