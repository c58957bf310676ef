"""Clients of OpenAI's interface, as they are, against a server in a process of its own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.hub import save_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import hgrn_bit
from tests.readme.documents import sections
from tests.server.conftest import GOLDENS
from tests.server.process import ServerProcess
from tests.server.test_readme import PAGE, SHOWN

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("default"),
]

KEY = "of-the-tests"
TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>
{% endfor %}{% endfor %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"""
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello there"},
]
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "hen"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = tmp_path_factory.mktemp("model") / "tokenizer"
    shutil.copytree(GOLDENS / "tokenizer_bpe", tokenizer)
    file = tokenizer / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    mx.random.seed(5)
    config = hgrn_bit.Config(
        vocab_size=518,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        initializer_range=0.3,
    )
    save_model(folder, pack_linears(hgrn_bit.build(config)), tokenizer)
    with ServerProcess("--model", folder, "--api-key", KEY, "--temp", "0") as server:
        yield server


@pytest.fixture(scope="module")
def openai_client(server: ServerProcess) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def test_openai_answers_and_streams(openai_client: Any) -> None:
    create = openai_client.chat.completions.create
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
    whole = create(**options, logprobs=True, top_logprobs=2, n=2, seed=1)
    first, second = whole.choices
    assert first.message.content == second.message.content
    assert len(first.logprobs.content) == whole.usage.completion_tokens // 2 == 12
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    chunks = list(create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == first.message.content
    assert chunks[-1].usage.completion_tokens == 12
    # an answer goes back as it came
    again = [*MESSAGES, first.message, {"role": "user", "content": "More"}]
    assert create(**options | {"messages": again}).usage.completion_tokens == 12


def test_openai_completes_embeds_and_lists(openai_client: Any) -> None:
    complete = openai_client.completions.create
    options: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 6}
    whole = complete(**options, logprobs=2, stop=["never"], logit_bias={"5": -100})
    assert len(whole.choices[0].logprobs.tokens) == 6
    streamed = complete(**options, logit_bias={"5": -100}, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    # the client asks for base64 and decodes it
    vectors = openai_client.embeddings.create(model="tiny", input=["Hello", "there"])
    assert [len(entry.embedding) for entry in vectors.data] == [32, 32]
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    assert openai_client.models.retrieve("tiny").owned_by == "mlx_mmfree"


def test_openai_calls_tools_and_follows_schemas(openai_client: Any) -> None:
    create = openai_client.chat.completions.create
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40}
    format = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    (choice,) = create(**options, response_format=format).choices
    assert json.loads(choice.message.content)["kind"] in ("fox", "hen")
    asked = create(**options, tools=[TOOL], tool_choice="auto")
    assert asked.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_openai_tells_errors_apart(openai_client: Any) -> None:
    import openai

    create = openai_client.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="other", prompt="a")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="tiny", prompt="a", echo=True)
    assert refused.value.param == "echo"
    with pytest.raises(openai.AuthenticationError):
        openai_client.with_options(api_key="wrong").models.list()


def test_litellm(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    options = {
        "model": "openai/tiny",
        "messages": MESSAGES,
        "api_base": f"{server.url}/v1",
        "api_key": KEY,
        "max_tokens": 8,
        "num_retries": 0,
    }
    whole = litellm.completion(**options)
    assert whole.usage.completion_tokens == 8
    chunks = litellm.completion(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**options | {"model": "openai/other"})


def test_langchain(server: ServerProcess) -> None:
    langchain = pytest.importorskip("langchain_openai")
    options = {"base_url": f"{server.url}/v1", "api_key": KEY, "model": "tiny", "max_retries": 0}
    chat = langchain.ChatOpenAI(**options, max_tokens=30)
    pairs = [("system", "Be brief."), ("human", "Hello there")]
    whole = chat.invoke(pairs)
    assert whole.usage_metadata["output_tokens"] == 30
    assert "".join(chunk.content for chunk in chat.stream(pairs)) == whole.content
    for method in ("json_schema", "function_calling"):
        long = langchain.ChatOpenAI(**options, max_tokens=200)
        structured = long.with_structured_output(SCHEMA | {"title": "animal"}, method=method)
        assert structured.invoke(pairs)["kind"] in ("fox", "hen")
    bound = chat.bind_tools([TOOL])
    assert bound.invoke(pairs).response_metadata["finish_reason"]
    vectors = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    assert len(vectors.embed_query("Hello")) == 32


def test_the_program_of_the_page() -> None:
    pytest.importorskip("openai")
    [code] = [code for part in sections(PAGE) for code in part.blocks("py")]
    assert SHOWN in code
    with ServerProcess() as server:
        finished = subprocess.run(
            [sys.executable, "-c", code.replace(SHOWN, server.url)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert finished.returncode == 0, finished.stderr
    assert len(finished.stdout) > 20
