"""Describes the machine and uses it: BLAS, threads, device, memory, terminal, confined processes."""
