import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree import demo
from mlx_mmfree.hub import Tokenizer, load
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, hgrn_bit

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
if importlib.util.find_spec("starlette") is None:
    # without the extra 'serve' only the page can be imported
    collect_ignore_glob = ["test_[!p]*.py", "test_process.py"]


@pytest.fixture(scope="session")
def demo_model() -> tuple[Decoder, Tokenizer]:
    """The model in the package, which has no chat template."""
    return load(demo.path())


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tokenizer]:
    """A random model whose tokenizer has a chat template."""
    return with_template(tmp_path_factory.mktemp("chat") / "tokenizer", None)


def with_template(
    folder: Path,
    template: str | None,
    unused: int = 0,
    tokens: Mapping[str, bool] = MappingProxyType({}),
    end: str | None = None,
) -> tuple[Decoder, Tokenizer]:
    """A random model whose tokenizer has another chat template, if one is given.

    Args:
        folder: Gets the tokenizer.
        template: The template.
        unused: How many logits the model has beyond the tokens of the tokenizer. If it is negative, so
            many tokens `<more0>` and so on are added, which have none.
        tokens: Tokens that are added, each with whether it is special.
        end: The token that ends a turn, where it is another one.
    """
    shutil.copytree(GOLDENS / "tokenizer_bpe", folder)
    added = {**tokens, **{f"<more{n}>": True for n in range(-unused)}}
    if added:
        size = Tokenizer.from_folder(folder).vocab_size
        vocabulary = json.loads((folder / "tokenizer.json").read_text())
        own = vocabulary["added_tokens"]
        own += [
            own[-1] | {"id": size + n, "content": content, "special": special}
            for n, (content, special) in enumerate(added.items())
        ]
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    changed = {"chat_template": template, "eos_token": end}
    file = folder / "tokenizer_config.json"
    given = {key: value for key, value in changed.items() if value is not None}
    file.write_text(json.dumps(json.loads(file.read_text()) | given))
    tokenizer = Tokenizer.from_folder(folder)
    mx.random.seed(5)
    config = hgrn_bit.Config(
        vocab_size=tokenizer.vocab_size + unused,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        initializer_range=0.3,
    )
    return pack_linears(hgrn_bit.build(config)), tokenizer


@pytest.fixture(scope="session")
def start(
    demo_model: tuple[Decoder, Tokenizer], chat_model: tuple[Decoder, Tokenizer]
) -> Callable[..., Any]:
    """Makes a client, to be used in `with`, of a server of two models with other settings."""
    from starlette.testclient import TestClient

    from mlx_mmfree.generation.sessions import Sessions
    from mlx_mmfree.server.app import make_app
    from mlx_mmfree.server.run import make_service
    from mlx_mmfree.server.settings import ServedModel, Settings

    def client(*more: ServedModel, **settings: Any) -> TestClient:
        pairs = {"demo": demo_model, "chat": chat_model}
        sessions = Sessions(demo_model[0], memory_bytes=10**8)
        models = [
            ServedModel(name, *pair, sessions.for_model(pair[0])) for name, pair in pairs.items()
        ]
        service = make_service([*models, *more], Settings(**settings), sessions)
        return TestClient(make_app(service), base_url="http://127.0.0.1:8080")

    return client


@pytest.fixture(scope="module")
def client(start: Callable[..., Any]) -> Iterator[Any]:
    """A client of a server with the usual settings."""
    with start() as client:
        yield client


def events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of events, which must end as it should."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def stream(client: Any, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    body = {"temperature": 0, "max_tokens": 12, "stream": True} | body
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


# what the model writes is rendered as it was written
CALLING = """{%- if tools %}{{ tools | tojson }}
{{ 'Return {"name": <function-name>, "arguments": <args-json-object>} in <tool_call></tool_call>' }}
{%- endif %}
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '</tool_call>' }}{% endfor %}{{ '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"""
LOOK = '<tool_call>{"name": "look_up", "arguments": {"word": "fox"}}</tool_call><|eot_id|>'


def as_templates_read(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a chat as a template gets them first."""
    from mlx_mmfree.server.conversation import CallRules, arrangements, turns_of
    from mlx_mmfree.server.tool_calls.call_formats import USUAL_FORMAT

    first = next(arrangements(turns_of(messages), CallRules(USUAL_FORMAT)))
    return [message for _, message in first]


class Dictated:
    """A client of a server whose model `m` writes given texts.

    Args:
        client: The client.

    Attributes:
        client: As above.
        texts: What comes next.
    """

    def __init__(self, client: Any):
        self.client = client
        self.texts: list[str] = []

    def next(self, conversation: str) -> str:
        """The next text, whatever was reported."""
        return self.texts.pop(0)

    def post(self, path: str, *texts: str, **body: Any) -> Any:
        """The answer to a request for which the model writes these texts."""
        self.texts += texts
        return self.client.post(path, json={"model": "m", **body})

    def events(self, path: str, *texts: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer, each named by its type."""
        response = self.post(path, *texts, stream=True, **body)
        assert response.status_code == 200, response.text
        found = []
        for event in response.text.split("\n\n")[:-1]:
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


@pytest.fixture(scope="module")
def dictated(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dictated]:
    from mlx_mmfree.generation.sessions import Sessions
    from mlx_mmfree.server.settings import ServedModel
    from tests.server.stand_in import dictate

    model, tokenizer = with_template(tmp_path_factory.mktemp("dictated") / "m", CALLING)
    sessions = Sessions(model, memory_bytes=10**8)
    with start(ServedModel("m", model, tokenizer, sessions)) as client:
        made = Dictated(client)
        with dictate(made.next, "m"):
            yield made
