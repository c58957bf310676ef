"""Frames of bytes over a socket, the protocol between a confined process and the program.

`multiprocessing.connection` would need no code here, but its import is slow on the confined side.
"""

import socket
import struct

_SIZE = struct.Struct("<Q")
_PART_BYTES = 2**20

MOST_BYTES = 2**30
"""The most bytes of an answer."""


def send(connection: socket.socket, data: bytes) -> None:
    """Sends one frame."""
    connection.sendall(_SIZE.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket, limit_bytes: int) -> bytes:
    """Waits for one frame.

    Raises:
        EOFError: The other side closed the connection.
        ValueError: The frame is longer than `limit_bytes`.
    """
    (size,) = _SIZE.unpack(_exactly(connection, _SIZE.size))
    if size > limit_bytes:
        raise ValueError(f"a frame must have at most {limit_bytes} bytes but has {size}")
    return bytes(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), _PART_BYTES))
        if not part:
            raise EOFError
        data += part
    return data
