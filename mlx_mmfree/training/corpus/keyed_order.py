"""Orders of numbers that follow from a key, one number at a time, without a list of them."""

import hashlib

_ROUNDS = 6


def keyed_order(place: int, count: int, key: bytes) -> int:
    r"""The number that stands at a place of a pseudorandom order of :math:`0, …, n - 1`.

    A Feistel network (Luby and Rackoff, doi 10.1137/0217022) orders the numbers of an even number of
    bits. It is applied until the result is below :math:`n` (Black and Rogaway, doi
    10.1007/3-540-45760-7_9), which takes fewer than four times on average.

    Args:
        place: A place, from 0 to `count - 1`.
        count: How many numbers there are.
        key: Up to 64 bytes, which decide the order.
    """
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = 2**half_bits - 1
    number = place
    while True:
        left, right = number >> half_bits, number & mask
        for turn in range(_ROUNDS):
            message = bytes([turn]) + right.to_bytes(8, "little")
            digest = hashlib.blake2b(message, key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        number = left << half_bits | right
        if number < count:
            return number
