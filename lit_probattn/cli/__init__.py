"""The command line `python -m lit_probattn {fit,validate,test,predict}`."""

from lit_probattn.cli.app import main

__all__ = ["main"]
