"""The checkpoint that servers read: one that is there, or one of random weights in a known shape."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ... import demo
from ...hub import save_model
from ..benchmark_weights import presets, random_model


@contextmanager
def checkpoint(model: str | None) -> Iterator[str]:
    """The folder or repository of a model.

    Args:
        model: Folder or Hub repository; a name of `presets()`, which gets random weights and the
            packaged tokenizer; or `None` for the packaged model.
    """
    if model not in presets():
        yield str(demo.path()) if model is None else model
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, model)
        save_model(folder, random_model(presets()[model]), demo.path())
        yield str(folder)
