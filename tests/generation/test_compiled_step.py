"""How often a decoding step's graph is built in Python: once for each shape, not for each token."""

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree import native
from mlx_mmfree.generation import (
    Chat,
    batch_generate,
    cache_prompt,
    generate_tokens,
    load_prompt_cache,
    save_prompt_cache,
)
from mlx_mmfree.generation.reader import Reader
from mlx_mmfree.generation.scheduling import Request, Scheduler
from mlx_mmfree.generation.speculative import SpeculativeDecoding
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.layers.attention import key_values as key_value_state
from mlx_mmfree.models import Decoder, hgrn_bit, llama
from mlx_mmfree.ops.backend.compilation import can_compile, compiled
from mlx_mmfree.ops.backend.graph import graph_of
from tests.generation.models import MODELS, VOCABULARY, alone
from tests.generation.scheduling.running import Characters, run

PROMPT = [3, 1, 4, 1, 5]
FIXED = ["recurrent", "attention"]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module", autouse=True)
def _compiles() -> None:
    if not can_compile():
        pytest.skip("MLX cannot compile here")
    # MLX traces the first function of a process twice
    compiled(lambda x: -x)(mx.array(1))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape `(B, L)` of each call of the head in Python; reading a prompt calls none."""
    shapes: list[tuple[int, ...]] = []
    head = Decoder.logits

    def recorded(self: Decoder, hidden: mx.array) -> mx.array:
        shapes.append(hidden.shape[:-1])
        return head(self, hidden)

    monkeypatch.setattr(Decoder, "logits", recorded)
    return shapes


def for_tokenizer(kind: str, tokenizer: Tokenizer) -> Decoder:
    mx.random.seed(8)
    if kind == "recurrent":
        config = hgrn_bit.Config(vocab_size=tokenizer.vocab_size, linear_class="dense", **SIZES)
        return hgrn_bit.build(config)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return llama.build(llama.Config(vocab_size=tokenizer.vocab_size, **SIZES, **heads))


@pytest.mark.parametrize("name", FIXED)
def test_one_text(name: str, built: list[tuple[int, ...]]) -> None:
    assert len(list(generate_tokens(MODELS[name](1), PROMPT, max_tokens=12))) == 12
    assert built == [(1, 1)]


@pytest.mark.skipif(native.unavailable() is not None, reason="the compiled kernels join")
@pytest.mark.parametrize("name", FIXED)
def test_the_blocks_are_one_operation_of_mlx(name: str) -> None:
    model = MODELS[name](1)
    state: Any = model.init_state(1)
    mx.eval(model.parameters(), state)
    reader = Reader(model, state)
    for token in PROMPT:
        logits, _ = reader.read(mx.array([token]))
        state = tree_flatten(reader.arrays)
        names = [node.name for node in graph_of([logits, *(each for _, each in state)]).nodes]
        assert names.count("Joined") == 1
        assert not {"BitLinear", "RmsNorm", "AttentionStep", "Multiply"} & set(names)
        mx.eval(logits, reader.arrays)


def test_again_where_the_space_for_keys_and_values_grows(
    built: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value_state, "GROWTH_STEP", 8)
    list(generate_tokens(MODELS["attention"](1), PROMPT, max_tokens=30))
    # the last token is not read
    assert len(built) == -(-(len(PROMPT) + 29) // 8)


@pytest.mark.parametrize("name", ["window", "quantised"])
def test_a_state_without_fixed_shapes_takes_a_graph_a_token(
    name: str, built: list[tuple[int, ...]]
) -> None:
    list(generate_tokens(MODELS[name](1), PROMPT, max_tokens=12))
    assert len(built) == 12


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_a_batch_once_for_each_number_of_rows(
    kind: str, tokenizer: Tokenizer, built: list[tuple[int, ...]]
) -> None:
    model, prompts = for_tokenizer(kind, tokenizer), [[5], [7, 8, 9, 10], [11, 12]]
    texts = batch_generate(model, tokenizer, prompts, max_tokens=12).tokens
    assert [len(row) for row in texts] == [12, 12, 12]
    assert built == [(3, 1)]
    built.clear()
    # a token that ends one row before the others
    end = next(t for row in texts for t in row if sum(t in other for other in texts) == 1)
    texts = batch_generate(model, tokenizer, prompts, max_tokens=12, extra_eos_tokens=[end]).tokens
    assert sorted(map(len, texts))[1:] == [12, 12] and min(map(len, texts)) < 12
    assert built == [(3, 1), (2, 1)]


@pytest.mark.parametrize("name", FIXED)
def test_rows_that_come_and_go_once_for_each_number(
    name: str, built: list[tuple[int, ...]]
) -> None:
    scheduler = Scheduler(MODELS[name](1), Characters(VOCABULARY), max_rows=3)
    for n in range(20):
        run(scheduler, [Request([n, 1, 2], max_tokens=n % 7 + 2)] * (n % 5))
    assert sorted(built) == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_a_conversation_once_a_turn(
    kind: str, tokenizer: Tokenizer, built: list[tuple[int, ...]]
) -> None:
    chat = Chat(for_tokenizer(kind, tokenizer), tokenizer, max_tokens=9)
    for turn in range(1, 4):
        assert len(list(chat.answer("The dog"))) == 9
        assert built == [(1, 1)] * turn


@pytest.mark.parametrize("name", FIXED)
def test_a_saved_prompt(name: str, built: list[tuple[int, ...]], tmp_path: Path) -> None:
    model, file = MODELS[name](1), tmp_path / "prompt.safetensors"
    save_prompt_cache(file, model, cache_prompt(model, PROMPT))
    state = load_prompt_cache(file, model).state
    assert len(list(generate_tokens(model, [4, 2], state=state, max_tokens=12))) == 12
    assert built == [(1, 1)]


@pytest.mark.parametrize("name", FIXED)
def test_speculation_once_for_each_number_of_tokens(
    name: str, built: list[tuple[int, ...]]
) -> None:
    model, draft = MODELS[name](1), MODELS[name](2)
    want = alone(model, PROMPT, 25)
    built.clear()
    decoding = SpeculativeDecoding(model, draft, mx.array([PROMPT]), num_draft_tokens=4)
    got = [decoding.step(is_last=n == 25)[0] for n in range(1, 26)]
    assert got == want
    assert decoding.stats.proposed > 4 * 4
    count = Counter(built)
    assert count[1, 5] == 1
    # the draft's steps, and the model's last
    assert count[1, 1] == 2
    # after a round in which all were kept, the draft has two to read
    assert count[1, 2] <= 1 and count.total() <= 4


@pytest.mark.parametrize("names", [("attention", "recurrent"), ("recurrent", "attention")])
def test_capacity_grows_while_tokens_are_proposed(
    names: tuple[str, str], built: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value_state, "GROWTH_STEP", 16)
    model, draft = (MODELS[name](1) for name in names)
    want = alone(model, PROMPT, 60)
    built.clear()
    decoding = SpeculativeDecoding(model, draft, mx.array([PROMPT]), num_draft_tokens=3)
    assert [decoding.step()[0] for _ in range(60)] == want
    assert 5 <= len(built) <= 12
