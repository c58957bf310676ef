"""Paths that users write are followed, and odd ones do not raise."""

from pathlib import Path

import pytest

from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.files.reading import expanded, real_path
from mlx_mmfree.generation.prompt_cache import read_settings
from mlx_mmfree.hub.publish.upload import plan_upload


def test_home_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to("folder")
    assert expanded("~/link") == tmp_path / "link"
    assert real_path("~/link") == tmp_path.resolve() / "folder"
    assert expanded("~no-such-user/a") == Path("~no-such-user/a")


def test_a_loop_of_links_is_refused_where_it_is_opened(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(MMFreeError, match="loop"):
        read_settings(loop)
    with pytest.raises(MMFreeError, match="loop"):
        plan_upload(loop, "me/model")
