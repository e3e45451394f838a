"""``python -m dflash``, which is how torchrun starts a rank."""

from dflash.cli import main

main()
