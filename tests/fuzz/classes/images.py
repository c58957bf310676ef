"""Damaged, odd and oversized pictures, and odd descriptions of how they are prepared."""

import copy
import io
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from mlx_mmfree.files.reading import read_json_object
from mlx_mmfree.images import ImageProcessor
from tests.fuzz.case import OUTSIDE, FuzzClass
from tests.fuzz.hostile import damage_bytes, damage_json, odd_entry, with_raw_json

_NUMBERS = (0, 1, 2, 8, 255, 256, 8000, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)
_CONFIG = {
    "architecture": "odd",
    "pretrained_cfg": {
        "input_size": [3, 24, 32],
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "crop_mode": "center",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    },
}
_PREPROCESSOR = {
    "image_processor_type": "DeiTImageProcessor",
    "do_center_crop": True,
    "crop_size": {"height": 24, "width": 32},
    "size": {"height": 32, "width": 40},
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def make_sources(folder: Path) -> None:
    """Pictures in each format and most of their modes."""
    pixels = np.random.default_rng(0).integers(0, 256, (18, 24, 3), np.uint8)
    colour = Image.fromarray(pixels)
    frames = [colour, colour.rotate(90, expand=True)]
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "a description"
    described: dict[str, Any] = {"exif": exif, "icc_profile": bytes(200)}
    many: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    deep = Image.fromarray((pixels[..., 0].astype(np.uint16) << 8) + 3)
    folder.mkdir(exist_ok=True)
    for name, picture, options in (
        ("plain.jpg", colour, described),
        ("progressive.jpg", colour, {"progressive": True, "comment": b"a comment"}),
        ("restarts.jpg", colour, {"restart_marker_rows": 1, "subsampling": 0}),
        ("inks.jpg", colour.convert("CMYK"), {}),
        ("colour.png", colour, described | {"dpi": (72, 72)}),
        ("palette.png", colour.quantize(16), {"transparency": bytes(range(16))}),
        ("deep.png", deep, {}),
        ("alpha.png", colour.convert("RGBA"), {}),
        ("bits.png", colour.convert("1"), {}),
        ("frames.png", frames[0], {"save_all": True, "append_images": [colour.rotate(180)]}),
        ("frames.gif", colour, many | {"comment": b"a comment"}),
        ("plain.gif", colour.convert("L"), {}),
        ("lossy.webp", colour, described),
        ("lossless.webp", colour.convert("RGBA"), {"lossless": True}),
        ("frames.webp", colour, {"save_all": True, "append_images": [colour.rotate(180)]}),
        ("colour.bmp", colour, {}),
        ("palette.bmp", colour.quantize(16), {}),
        ("odd.tiff", colour, {}),
    ):
        stream = io.BytesIO()
        picture.save(stream, Path(name).suffix[1:].replace("jpg", "jpeg"), **options)
        (folder / name).write_bytes(stream.getvalue())


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Damages a picture, makes its parts tell of others, or damages the configuration beside it."""
    target.mkdir()
    source = rng.choice(sorted(sources.iterdir()))
    data = source.read_bytes()
    file, config = target / "picture", target / "config.json"
    kind = rng.choice(("bytes", "cut", "number", "part", "part", "joined", "config", "entry"))
    file.write_bytes(data)
    config.write_text(json.dumps(_CONFIG))
    if kind == "bytes":
        file.write_bytes(damage_bytes(data, rng))
    elif kind == "cut":
        file.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "number":
        file.write_bytes(_with_number(data, rng))
    elif kind == "part":
        file.write_bytes(_with_odd_part(data, rng))
    elif kind == "joined":
        other = rng.choice(sorted(sources.iterdir())).read_bytes()
        start, stop = rng.randrange(len(data)), rng.randrange(len(other))
        file.write_bytes(data[:start] + other[stop:])
    elif kind == "config":
        return f"{kind} {_write_config(target, rng)}"
    else:
        return odd_entry(file, target.parent / OUTSIDE / "secret.txt", rng)
    return f"{kind} of {source.name}"


def _write_config(target: Path, rng: random.Random) -> str:
    name, values = rng.choice(
        (("config.json", _CONFIG), ("preprocessor_config.json", _PREPROCESSOR))
    )
    text = json.dumps(values).encode()
    damaged = (
        damage_json(text, rng)
        if rng.random() < 0.7
        else with_raw_json(copy.deepcopy(values), rng).encode()
    )
    (target / name).write_bytes(damaged)
    return f"{name}: {damaged[:300]!r}"


def _with_number(data: bytes, rng: random.Random) -> bytes:
    """Another number of two or four bytes, mostly among the first, where the headers are."""
    changed = bytearray(data)
    format = rng.choice((">H", "<H", ">I", "<I"))
    offset = rng.randrange(min(len(data), rng.choice((40, 40, 200, len(data)))))
    number = rng.choice(_NUMBERS) % (1 << 8 * struct.calcsize(format))
    changed[offset : offset + struct.calcsize(format)] = struct.pack(format, number)
    return _with_checksums(bytes(changed))


def _with_odd_part(data: bytes, rng: random.Random) -> bytes:
    """A chunk, segment or block with odd content, where one may stand."""
    content = rng.choice(
        (
            b"",
            b"a",
            bytes(13),
            rng.randbytes(40),
            b"Exif\0\0" + rng.choice((b"II*\0", b"MM\0*")) + rng.randbytes(60),
            b"ICC_PROFILE\0\1\2" + bytes(9),
            b"MPF\0II*\0" + rng.randbytes(30),
            b"Photoshop 3.0\0" + b"8BIM" + rng.randbytes(30),
            b"a\0\0" + zlib.compress(bytes(rng.choice((10, 2_000_000)))),
            struct.pack(">IIBBBBB", 7000, 9000, 8, rng.choice((0, 2, 3, 4, 6)), 0, 0, 0),
            struct.pack(">IIIIIHHBB", 1, *rng.choices(_NUMBERS, k=4), 1, 1, 0, 0),
            struct.pack("<IIII", *rng.choices(_NUMBERS, k=4)),
            struct.pack(">BHHB", 8, 7000, 9000, 3) + b"\1\x22\0\2\x11\1\3\x11\1",
        )
    )
    count = rng.choice((1, 1, 1, 2, 150, 3000))
    if data.startswith(b"\x89PNG"):
        offsets = [8, 33, len(data) - 12]
        name = rng.choice((b"IHDR", b"PLTE", b"tRNS", b"iCCP", b"zTXt", b"iTXt", b"eXIf", b"acTL"))
        name = rng.choice((name, b"fcTL", b"fdAT", b"IDAT", b"IEND", b"gAMA", b"pHYs", b"cHRM"))
        part = struct.pack(">I", len(content)) + name + content
        part += struct.pack(">I", zlib.crc32(name + content))
    elif data.startswith(b"\xff\xd8"):
        offsets = [2, 20, data.index(b"\xff\xda"), len(data) - 2]
        marker = rng.choice(
            (0xE0, 0xE1, 0xE2, 0xED, 0xEE, 0xFE, 0xC0, 0xC2, 0xC4, 0xDA, 0xDB, 0xDD)
        )
        part = struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content
    elif data.startswith(b"RIFF"):
        offsets = [12, 30, len(data)]
        name = rng.choice((b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF", b"EXIF", b"ICCP"))
        part = name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    elif data.startswith(b"GIF"):
        offsets = [13, len(data) - 1, data.index(b"\x21") if b"\x21" in data else 13]
        block = b"".join(bytes([len(chunk)]) + chunk for chunk in (content[:255],) if chunk)
        part = b"\x21" + rng.choice((b"\xfe", b"\xf9", b"\xff", b"\x01")) + block + b"\0"
    else:
        offsets, part = [14, 18, len(data)], content
    offset = rng.choice(offsets)
    whole = data[:offset] + part * count + data[offset:]
    if data.startswith(b"RIFF"):
        whole = whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:]
    return whole


def _with_checksums(data: bytes) -> bytes:
    """The chunks of a PNG file with the right checksums; other files as they are."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    offset, parts = 8, [data[:8]]
    while offset + 12 <= len(data):
        length = int.from_bytes(data[offset : offset + 4], "big")
        body = data[offset + 4 : offset + 8 + length]
        if offset + 12 + length > len(data):
            break
        parts += [data[offset : offset + 4], body, struct.pack(">I", zlib.crc32(body))]
        offset += 12 + length
    return b"".join(parts) + data[offset:]


def exercise(folder: Path, rng: random.Random) -> None:
    """Prepares the picture as the configuration says."""
    file = folder / "preprocessor_config.json"
    config = read_json_object(file if file.exists() else folder / "config.json")
    processor = ImageProcessor.from_config(config)
    images = processor([folder / "picture"])
    if images.shape != (1, *processor.size, processor.channels):
        raise AssertionError(f"images of shape {images.shape}")
    if not mx.isfinite(images).all():
        raise AssertionError("values that are not finite")


CLASS = FuzzClass(make_sources, mutate, exercise, memory_bytes=900_000_000, batch=200, count=400)
