"""What the reader and the writer of GGUF files agree on."""

from enum import IntEnum

MAGIC = b"GGUF"
ALIGNMENT = 32
"""The usual value of `general.alignment`: tensors begin at multiples of so many bytes."""


class ValueType(IntEnum):
    """The types of values in the metadata, by their numbers in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOLEAN = 7
    TEXT = 8
    LIST = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12
