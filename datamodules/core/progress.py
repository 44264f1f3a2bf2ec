"""Progress of preparations, under the name that `datamodules/text` imports."""

from lit_probattn.base.progress import progress

__all__ = ["progress"]
