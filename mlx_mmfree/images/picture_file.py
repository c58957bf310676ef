"""Opens the file of a picture, which may be hostile, with Pillow.

Only a few formats are tried, and one that needs few lines of C each. The size is read from the header
and bounded before anything is decoded. Whatever a decoder says of a damaged file becomes one line."""

import io
import os
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ImageError, install_extra
from ..files.reading import read_file

if TYPE_CHECKING:
    from PIL.Image import Image


def require_pillow() -> None:
    """Says how to install Pillow where it is missing.

    Raises:
        ImageError: It is not installed.
    """
    if find_spec("PIL") is None:
        raise ImageError(
            "[image] pictures need the package Pillow, which is not installed. "
            + install_extra("vision")
        )


_START_OF_IMAGE = b"\xff\xd8"
# without stuffed bytes, fill bytes and restarts, which have no segment
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA


def scan_count(data: bytes) -> int:
    """The number of scans of a JPEG file, as a decoder meets them; 0 for other files.

    A progressive JPEG is decoded scan by scan, each over all of its pixels, and a scan takes few bytes:
    a file of a megabyte could keep a decoder busy for a quarter of an hour.
    """
    if not data.startswith(_START_OF_IMAGE):
        return 0
    count, start = 0, len(_START_OF_IMAGE)
    while (marker := _MARKER.search(data, start)) and marker[1][0] != _END_OF_IMAGE:
        count += marker[1][0] == _START_OF_SCAN
        length = int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        start = marker.end() + max(length, 2)
    return count


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64_000_000
MAX_BYTES = 100_000_000
MAX_SCANS = 100
"""Progressive JPEG files have about ten, and a scan of the most pixels takes a tenth of a second."""

_NAMES = "JPEG, PNG, WebP, GIF or BMP"
_ORIENTATION = 0x0112
# the value of the tag, and what makes such a picture upright: names of PIL.Image.Transpose
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def read_picture(
    file: str | os.PathLike[str], *, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_BYTES
) -> "Image":
    """Reads the first frame of a picture, upright, in 8-bit grey (`L`) or colour (`RGB`).

    A picture is turned as its EXIF orientation says, as viewers do. The alpha channel is left out.
    Of 16-bit grey the upper 8 bits are kept, as Pillow does for 16-bit colour.

    Args:
        file: A JPEG, PNG, WebP, GIF or BMP file.
        max_pixels: The most pixels it may have; the header tells. Pillow has a limit of its own, of 179
            million.
        max_bytes: The most bytes the file may have.

    Returns:
        An image of Pillow.

    Raises:
        ImageError: The file cannot be read, is none of these, is damaged, or is beyond a limit, or
            Pillow is not installed.

    Example:
        >>> from PIL import Image
        >>> Image.new("RGB", (64, 48)).save("grey.png")
        >>> read_picture("grey.png").size
        (64, 48)
    """
    require_pillow()
    from PIL import Image, UnidentifiedImageError

    path = Path(file)
    try:
        data = read_file(path, max_bytes)
    except (OSError, ValueError) as error:
        raise ImageError(f"[image] '{path}' cannot be read: {_reason(error)}.") from error
    try:
        with warnings.catch_warnings():
            # a picture is used or refused; what else may be odd in its file is of no use to anyone
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                _check_size(path, picture, max_pixels)
                _check_scans(path, data)
                return upright(picture)
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"[image] '{path}' must have fewer pixels: {_reason(error)}. Make it smaller."
        ) from error
    except UnidentifiedImageError as error:
        raise ImageError(
            f"[image] '{path}' must be a {_NAMES} file but is none, or its first bytes are damaged. "
            "Save it as one."
        ) from error
    # a decoder meets damage with errors of many kinds, from struct.error to SyntaxError
    except Exception as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(
            f"[image] '{path}' must be a sound {_NAMES} file but cannot be decoded: {_reason(error)}. "
            "Fetch it again, or save it anew with another program."
        ) from error


def _check_size(path: Path, picture: "Image", max_pixels: int) -> None:
    width, height = picture.size
    if width * height > max_pixels:
        raise ImageError(
            f"[image] '{path}' must have at most {max_pixels:,} pixels but has {width} x {height}. "
            "Make it smaller."
        )


def _check_scans(path: Path, data: bytes) -> None:
    count = scan_count(data)
    if count > MAX_SCANS:
        raise ImageError(
            f"[image] '{path}' must be a JPEG file of at most {MAX_SCANS} scans but has {count:,}. Save "
            "it anew with another program."
        )


def _eight_bits(picture: "Image") -> "Image":
    """Decodes a picture to 8-bit grey or colour."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    mode = "L" if picture.mode in ("1", "L", "LA") else "RGB"
    if picture.mode == mode:
        # a large picture would be copied
        picture.load()
        return picture
    return picture.convert(mode)


def upright(picture: "Image") -> "Image":
    """A picture of Pillow in 8-bit grey or colour, turned as the EXIF entry of its file says."""
    from PIL import Image

    decoded = _eight_bits(picture)
    turn = _UPRIGHT.get(picture.getexif().get(_ORIENTATION, 1))
    return decoded if turn is None else decoded.transpose(Image.Transpose[turn])


def _reason(error: Exception) -> str:
    """The message of an error in a short line, or its kind if it has none."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"
