"""`python -m mlx_mmfree`: the same as `mmfree`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
