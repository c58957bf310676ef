"""The pictures of the architecture are what their script draws of the library as it is."""

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.readme.documents import FOLDERS, MAIN, ROOT, links

FOLDER = ROOT / "examples" / "pictures"
PHONE = 480
"""The widest picture whose words can still be read on a phone, in pixels."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", FOLDER / "draw.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_what_the_script_draws(script: ModuleType, tmp_path: Path) -> None:
    script.main([str(tmp_path)])
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert len(drawn) == 3
    committed = {name: (FOLDER / name).read_text() for name in drawn}
    assert drawn == committed, "run python examples/pictures/draw.py"


def test_every_picture_stands_on_a_page() -> None:
    shown = {(page.parent / link).resolve() for page in (MAIN, *FOLDERS) for link in links(page)}
    assert set(FOLDER.glob("*.svg")) <= shown


@pytest.mark.parametrize("name", ["block", "house", "packed"])
def test_a_picture_fits_a_phone_and_its_boxes_fit_the_picture(name: str) -> None:
    root = ElementTree.parse(FOLDER / f"{name}.svg").getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert width <= PHONE
    for box in root.findall("{http://www.w3.org/2000/svg}rect[@rx]"):
        x, y, across, down = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0 and x + across <= width and y >= 0 and y + down <= height
