"""Two servers of the bundled model, one with a chat template and a key, and a browser."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mmfree import demo
from mlx_mmfree.hub import load_model
from mlx_mmfree.hub.adapters.adapter_folder import write_adapter
from mlx_mmfree.layers.lora import add_adapters
from tests.server.process import ServerProcess

KEY = "the key of the test"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    # a browser run by root, as in a container, has no sandbox
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
# the conversation as one text, which the model continues
_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="session")
def story() -> Iterator[str]:
    """The address of a server of the bundled model, which continues texts."""
    with ServerProcess() as server:
        yield server.url


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a model that chats, with an adapter; it asks for `KEY`."""
    folder = tmp_path_factory.mktemp("served")
    adapter = _adapter(folder / "pirate")
    flags = ("--model", _with_template(folder / "chatty"), "--adapter", f"pirate={adapter}")
    with ServerProcess(*flags, MLX_MMFREE_API_KEY=KEY) as server:
        yield server.url


def _with_template(folder: Path) -> Path:
    shutil.copytree(demo.path(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": _TEMPLATE}))
    return folder


def _adapter(folder: Path) -> Path:
    """An adapter that changes what the bundled model writes."""
    model = load_model(demo.path())
    mx.random.seed(1)
    add_adapters(model, lambda name, _: name.endswith("down_proj"), rank=2, scale=2.0)
    changed = [
        (name, value + 0.3 * mx.random.normal(value.shape))
        for name, value in tree_flatten(model.trainable_parameters())
    ]
    model.update(tree_unflatten(changed))
    write_adapter(folder, model, {"model": "demo"})
    return folder


# of a module: while playwright runs, no other test can have an event loop
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a window: one of this machine, or else the one that playwright brings."""
    api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    with api.sync_playwright() as playwright:
        if program is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip(
                f"no browser is installed: none of {', '.join(_BROWSERS)}, none of playwright"
            )
        found = playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        yield found
        found.close()


@dataclass
class Seen:
    """The record of a page's actions.

    Attributes:
        address: Of its server.
        expected: What the browser should say of it, in part.
        requests: The addresses that it has asked for.
        complaints: What the browser has said of it.
    """

    address: str
    expected: Sequence[str]
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


OpenPage = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Opens the page of a server in a window of its own.

    At the end, no page may have asked for anything but its server, and the browser may have complained
    of nothing but what the test expects.
    """
    contexts, pages = [], []

    def opened(
        address: str, *, key: str | None = None, expected: Sequence[str] = (), **options: Any
    ) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1000, "height": 760}} | options)
        contexts.append(context)
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('mmfree-api-key', {json.dumps(key)})")
        page = context.new_page()
        seen = Seen(address, expected)
        pages.append(seen)
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("pageerror", lambda error: seen.complaints.append(f"uncaught: {error}"))
        page.on("console", lambda message: seen.complaints.append(message.text))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    for seen in pages:
        own = (f"{seen.address}/", "data:")
        assert [url for url in seen.requests if not url.startswith(own)] == []
        pairs = zip_longest(seen.complaints, seen.expected, fillvalue="")
        assert [
            complaint for complaint, wanted in pairs if not wanted or wanted not in complaint
        ] == []
