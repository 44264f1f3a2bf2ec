"""LightningModules, one per kind of task; the attention variant is a constructor argument.

Names are imported when they are first used; `__init__.pyi` lists them, a line for each.
"""

from lit_probattn.base.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
