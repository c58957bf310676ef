"""mlx-lm saves and loads prompt caches of converted models."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree import demo
from mlx_mmfree.hub import convert, open_checkpoint
from tests.hub.checkpoints import GOLDENS
from tests.tolerances import TOLERANCE, relative_error

TOKENS = mx.array([[1, 7, 3, 39, 0, 12, 5, 22, 9]])
SPLIT = 5


@pytest.mark.usefixtures("unfused")  # mlx-lm lets MLX fuse its operations
@pytest.mark.parametrize("source", [demo.path(), GOLDENS / "prism_schema2"], ids=["demo", "prism"])
def test_a_text_goes_on_from_a_saved_cache(tmp_path: Path, source: Path) -> None:
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
    from mlx_lm.utils import load_model as load_with_mlx_lm

    convert(open_checkpoint(str(source)), tmp_path / "m", check=False)
    theirs, _ = load_with_mlx_lm(tmp_path / "m", trust_remote_code=True)
    cache = make_prompt_cache(theirs)
    mx.eval(theirs(TOKENS[:, :SPLIT], cache=cache))
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache, {"model": "m"})
    again, reported = load_prompt_cache(str(tmp_path / "cache.safetensors"), return_metadata=True)
    assert reported == {"model": "m"} and [type(each) for each in again] == [type(c) for c in cache]
    got = theirs(TOKENS[:, SPLIT:], cache=again)
    assert mx.array_equal(got, theirs(TOKENS[:, SPLIT:], cache=cache))
    assert relative_error(got, theirs(TOKENS)[:, SPLIT:]) <= 5 * TOLERANCE[mx.float32]
