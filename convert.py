"""Runs `mmfree convert`."""

import sys

from mlx_mmfree.cli import main

raise SystemExit(main(["convert", *sys.argv[1:]]))
