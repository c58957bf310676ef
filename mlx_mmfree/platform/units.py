"""The unit in which sizes of memory are shown and given."""

BYTES_PER_GB = 10**9
