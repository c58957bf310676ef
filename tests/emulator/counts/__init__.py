"""Costs of each kind of kernels: a file has a function `report`, which `yardstick` calls."""
