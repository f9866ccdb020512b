"""The command line."""

from patchmix.cli.main import main

__all__ = ["main"]
