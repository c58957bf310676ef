"""What each kind of kernels takes: a file has a function `report`, which `yardstick` calls."""
