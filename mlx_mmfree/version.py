"""The version of the library and the address of its repository, each stated once."""

__version__ = "0.1.0"
REPOSITORY = "https://github.com/OWNER/mlx_mmfree"
"""`OWNER` stands for the account until the repository has one. A release refuses it."""
