"""LightningModules, one per kind of task; the attention variant is a constructor argument.

Names are imported on first use; `__init__.pyi` lists them, one per line.
"""

from lit_probattn.base.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
