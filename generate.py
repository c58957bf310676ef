"""Runs `mmfree generate`."""

import sys

from mlx_mmfree.cli import main

raise SystemExit(main(["generate", *sys.argv[1:]]))
