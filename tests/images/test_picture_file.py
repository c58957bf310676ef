"""Files of pictures: their modes and orientation, and what is refused in one line."""

import io
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlx_mmfree.errors import ImageError, shown
from mlx_mmfree.images import read_picture
from mlx_mmfree.images.picture_file import scan_count

_TOO_MANY = r"bomb' must have (at most 64,000,000 pixels but has|fewer pixels: )"
SHOWN = np.arange(24, dtype=np.uint8).reshape(4, 6)


def saved(file: Path, picture: Image.Image, **options: Any) -> Path:
    picture.save(file, **options)
    return file


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.gif", "a.webp", "a.jpg", "wrong.name"])
def test_each_format_is_read_whatever_its_name(name: str, tmp_path: Path) -> None:
    colour = Image.new("RGB", (6, 4), (200, 100, 0))
    suffix = name.partition(".")[2]
    kind = {"name": "png", "jpg": "jpeg"}.get(suffix, suffix)
    read = read_picture(saved(tmp_path / name, colour, format=kind))
    assert (read.mode, read.size) == ("RGB", (6, 4))
    assert np.abs(np.asarray(read, int) - (200, 100, 0)).max() < 6


def test_modes(tmp_path: Path) -> None:
    colour = Image.merge("RGB", [Image.fromarray(SHOWN * n) for n in (1, 2, 3)])
    palette = colour.quantize(24)
    for picture in (colour, colour.convert("RGBA"), palette):
        # Pillow warns of palettes with an alpha channel
        options = {"transparency": bytes(range(24))} if picture is palette else {}
        read = read_picture(saved(tmp_path / "colour.png", picture, **options))
        assert np.array_equal(np.asarray(read), np.asarray(picture.convert("RGB")))
    hidden = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert read_picture(saved(tmp_path / "hidden.png", hidden)).getpixel((0, 0)) == (10, 20, 30)
    inks = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    read = read_picture(saved(tmp_path / "inks.jpg", inks, quality=95))
    assert np.abs(np.asarray(read, int) - (255, 0, 0)).max() < 6
    for mode in ("1", "L", "LA"):
        assert read_picture(saved(tmp_path / "g.png", Image.new(mode, (3, 2)))).mode == "L"


def test_grey_of_16_bits_keeps_its_upper_half(tmp_path: Path) -> None:
    deep = np.arange(0, 65536, 2731, dtype=np.uint16).reshape(4, 6)
    read = read_picture(saved(tmp_path / "deep.png", Image.fromarray(deep)))
    assert np.array_equal(np.asarray(read), deep >> 8)


def test_the_first_frame_is_read(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "a.webp", "a.png"):
        options = {"lossless": True} if name == "a.webp" else {}
        file = saved(tmp_path / name, frames[0], save_all=True, append_images=frames[1:], **options)
        assert read_picture(file).getpixel((1, 1)) == (255, 0, 0)


@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_turned_as_their_file_says(orientation: int, tmp_path: Path) -> None:
    stored = Image.fromarray(SHOWN)
    exif = Image.Exif()
    exif[0x0112] = orientation
    want: Any = {
        2: SHOWN[:, ::-1],
        3: SHOWN[::-1, ::-1],
        4: SHOWN[::-1],
        5: SHOWN.T,
        6: np.rot90(SHOWN, -1),
        7: SHOWN[::-1, ::-1].T,
        8: np.rot90(SHOWN),
    }
    for name in ("turned.png", "turned.webp"):
        read = read_picture(saved(tmp_path / name, stored, exif=exif, lossless=True))
        grey = np.asarray(read.convert("L"))
        assert np.array_equal(grey, want.get(orientation, SHOWN))


def bomb(kind: str, side: int) -> bytes:
    """A small file whose header tells of a picture of many pixels."""
    stream = io.BytesIO()
    Image.new("1" if kind in ("png", "bmp") else "L", (8, 8)).save(stream, kind)
    data = bytearray(stream.getvalue())
    two = side.to_bytes(2, "little") * 2
    if kind == "png":
        data[16:24] = side.to_bytes(4, "big") * 2
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    elif kind == "gif":
        data[6:10] = two
    elif kind == "bmp":
        data[18:26] = side.to_bytes(4, "little") * 2
    elif kind == "jpeg":
        start = data.index(b"\xff\xc0") + 5
        data[start : start + 4] = side.to_bytes(2, "big") * 2
    else:
        data[26:30] = two
    return bytes(data)


@pytest.mark.sample(2)
@pytest.mark.parametrize("side", [8_001, 12_000, 16_000])
@pytest.mark.parametrize("kind", ["png", "gif", "bmp", "jpeg", "webp"])
def test_large_pictures_are_refused_before_they_are_decoded(
    kind: str, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    (tmp_path / "bomb").write_bytes(bomb(kind, side))
    with pytest.raises(ImageError, match=_TOO_MANY):
        read_picture(tmp_path / "bomb")


def test_limits_are_arguments(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.png", Image.fromarray(SHOWN))
    assert read_picture(file, max_pixels=24).size == (6, 4)
    with pytest.raises(ImageError, match="at most 23 pixels but has 6 x 4"):
        read_picture(file, max_pixels=23)
    assert read_picture(file, max_bytes=file.stat().st_size)
    with pytest.raises(ImageError, match=r"cannot be read: it has \d+ bytes, more than the 20"):
        read_picture(file, max_bytes=20)


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    def reported(file: Path) -> str:
        with pytest.raises(ImageError) as error:
            read_picture(file)
        message = str(error.value)
        assert shown(str(file)) in message and "\n" not in message
        return message

    assert "No such file" in reported(tmp_path / "absent.png")
    assert "it is a folder" in reported(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    assert "it is a pipe" in reported(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    assert "loop.png" in reported(tmp_path / "loop.png")
    assert "null" in reported(Path("a\0b.png"))
    text = tmp_path / "text.png"
    for data in (b"", b"\x89PNG", b"a text", b"\xff\xd8\xff"):
        text.write_bytes(data)
        assert "must be a JPEG, PNG, WebP, GIF or BMP file but is none" in reported(text)
    saved(tmp_path / "a.tiff", Image.fromarray(SHOWN))
    assert "but is none" in reported(tmp_path / "a.tiff")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    for kind in ("png", "jpeg", "webp", "gif", "bmp"):
        whole = saved(tmp_path / f"whole.{kind}", Image.fromarray(noise)).read_bytes()
        text.write_bytes(whole[: len(whole) // 2])
        assert "must be a sound JPEG" in reported(text)


def test_pillow_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_mmfree.images.picture_file.find_spec", lambda name: None)
    with pytest.raises(
        ImageError, match=r"not installed\. Run this in .*: pip install '\.\[vision\]'"
    ):
        read_picture("a.png")


def test_pillow_is_imported_only_where_it_is_needed() -> None:
    code = "import sys, mlx_mmfree.images.processor; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_scans_of_jpeg_files_are_counted() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    for options, count in (({}, 1), ({"progressive": True}, 10), ({"restart_marker_rows": 1}, 1)):
        stream = io.BytesIO()
        # a marker within a comment starts no scan
        Image.fromarray(noise).save(stream, "jpeg", comment=b"\xff\xda" * 99, **options)
        data = stream.getvalue()
        assert scan_count(data) == count
        assert scan_count(data + data) == count
    assert scan_count(b"\xff\xd8\xff\xda") == 1
    assert scan_count(b"\xff\xd8" + b"\xff\xda\x00\x00" * 9) == 9
    assert scan_count(b"\x89PNG\xff\xda") == 0


def test_many_scans_are_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("L", (8, 8)).save(stream, "jpeg", progressive=True)
    data = stream.getvalue()
    scan = data[data.rindex(b"\xff\xda") : -2]
    file = tmp_path / "scans.jpg"
    file.write_bytes(data[:-2] + scan * 90 + data[-2:])
    assert read_picture(file).size == (8, 8)
    file.write_bytes(data[:-2] + scan * 100 + data[-2:])
    with pytest.raises(ImageError, match="at most 100 scans but has 106"):
        read_picture(file)
