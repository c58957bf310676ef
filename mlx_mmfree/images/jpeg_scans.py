"""Counts the scans of a JPEG file.

A progressive JPEG is decoded scan by scan, each over all of its pixels, and a scan takes few bytes: a
file of a megabyte could keep a decoder busy for a quarter of an hour.
"""

import re

_START_OF_IMAGE = b"\xff\xd8"
# without stuffed bytes, fill bytes and restarts, which have no segment
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA


def scan_count(data: bytes) -> int:
    """The number of scans of a JPEG file, as a decoder meets them; 0 for other files."""
    if not data.startswith(_START_OF_IMAGE):
        return 0
    count, place = 0, len(_START_OF_IMAGE)
    while (marker := _MARKER.search(data, place)) and marker[1][0] != _END_OF_IMAGE:
        count += marker[1][0] == _START_OF_SCAN
        length = int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        place = marker.end() + max(length, 2)
    return count
