from lit_probattn import functional as functional
from lit_probattn.base.config_files import list_attention as list_attention
from lit_probattn.configs import create as create
from lit_probattn.interop.multihead import as_multihead_attention as as_multihead_attention
from lit_probattn.interop.swap import swap as swap
from lit_probattn.interop.swap.interface import register as register

__version__: str
