"""`python -m patchmix`, which is what torchrun starts."""

from patchmix.cli import main

main()
