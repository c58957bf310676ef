"""Models of any mixers, described by their names."""

import inspect
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import yaml
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.attention.positions import ALiBi, RelativeBias
from mlx_mmfree.models import Decoder, EncoderDecoder, MaskedLM, SequenceClassifier, find
from mlx_mmfree.models.parts.mixers import token_mixers
from mlx_mmfree.models.parts.reversible import ReversibleBlock
from mlx_mmfree.models.parts.stack import TokenModel
from tests.readme.documents import ROOT, sections
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

METAFORMER = find("metaformer")
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
TOKENS = mx.array([[7, 3, 9, 1, 4], [2, 8, 8, 5, 6]])
TASKS = {
    "causal_lm": Decoder,
    "masked_lm": MaskedLM,
    "classifier": SequenceClassifier,
    "encoder_decoder": EncoderDecoder,
}


def build(**values: Any) -> TokenModel:
    mx.random.seed(1)
    model: TokenModel = METAFORMER.build(METAFORMER.config.from_hub(SIZES | values))
    return model


def _able(kind: str) -> list[str]:
    return [name for name, mixer in token_mixers().items() if getattr(mixer, kind)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", _able("causal"))
def test_every_causal_mixer_continues_texts(name: str) -> None:
    model = build(token_mixer=name, linear_class="ternary", tie_word_embeddings=False)
    assert type(model) is Decoder and model.is_causal
    whole, _ = model(TOKENS)
    assert whole.shape == (2, 5, 60)
    state, parts = None, []
    for n in range(5):
        logits, state = model(TOKENS[:, n : n + 1], state)
        parts.append(logits)
    assert relative_error(mx.concatenate(parts, axis=1), whole) <= TOLERANCE[mx.float32]


@pytest.mark.sample(2)
@pytest.mark.parametrize("task", ["masked_lm", "classifier"])
@pytest.mark.parametrize("name", _able("bidirectional"))
def test_every_bidirectional_mixer_sees_all(name: str, task: str) -> None:
    model = build(token_mixer=name, task=task, num_labels=3)
    assert type(model) is TASKS[task]
    first = model.predictions(TOKENS)
    assert first.shape == ((2, 3) if task == "classifier" else (2, 5, 60))
    changed = mx.concatenate([TOKENS[:, :-1], TOKENS[:, -1:] + 1], axis=1)
    # of the first position, or of the text
    seen, was = (y.reshape(2, -1)[:, :3] for y in (model.predictions(changed), first))
    assert not mx.array_equal(seen, was)


@pytest.mark.parametrize("name", _able("cross"))
def test_every_cross_mixer_reads_a_source(name: str) -> None:
    model = build(
        task="encoder_decoder",
        token_mixer="mlgru",
        encoder_token_mixer="linear_attention",
        encoder_layers=2,
        memory_mixer=name,
    )
    assert type(model) is EncoderDecoder
    first = model(TOKENS, TOKENS)[0]
    assert first.shape == (2, 5, 60)
    assert not mx.array_equal(model(TOKENS + 1, TOKENS)[0], first)


def test_a_list_repeats_from_layer_to_layer() -> None:
    window = {"name": "sliding_window_attention", "num_heads": 4}
    model = build(token_mixer=["mlgru", "mlgru", "mlgru", window], num_hidden_layers=6)
    names = [type(mixer).__name__ for mixer in model.token_mixers]
    assert names == ["MLGRU"] * 3 + ["SlidingWindowAttention"] + ["MLGRU"] * 2


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rope", "alibi", "relative_bias"])
def test_positions_tell_tokens_apart(positions: str) -> None:
    """Attention without positions sees a set: its last output does not depend on the order before."""
    swapped = TOKENS[:, mx.array([1, 0, 2, 3, 4])]
    for kind in ("none", positions):
        model = build(token_mixer="gqa", num_hidden_layers=1, positions=kind, initializer_range=0.5)
        difference = relative_error(model(swapped)[0][:, -1], model(TOKENS)[0][:, -1])
        assert (difference <= TOLERANCE[mx.float32]) == (kind == "none")


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_added_positions_go_on_with_the_state(positions: str) -> None:
    model = build(token_mixer="gqa", positions=positions)
    whole, _ = model(TOKENS)
    first, state = model(TOKENS[:, :2])
    rest, state = model(TOKENS[:, 2:], state)
    assert relative_error(mx.concatenate([first, rest], axis=1), whole) <= TOLERANCE[mx.float32]
    assert state[-1].read.tolist() == [5, 5]


def test_the_width_of_a_token_mixer_is_an_option_of_its_own() -> None:
    model = build(token_mixer={"name": "hgrn", "hidden_dims": 24}, intermediate_size=40)
    block = model.blocks[0]
    assert block.token_mixer.output_proj.weight.shape == (32, 24)
    assert block.channel_mixer.down_proj.weight.shape == (32, 40)


@pytest.mark.parametrize("positions", ["alibi", "relative_bias"])
def test_biases_are_of_each_stack(positions: str) -> None:
    """Of blocks that see the whole text too; mixers of a constant state may stand beside them."""
    model = build(
        task="encoder_decoder",
        encoder_layers=1,
        encoder_token_mixer={"name": "multi_head_attention", "num_heads": 4},
        token_mixer=["mlgru", {"name": "sliding_window_attention", "num_heads": 2}],
        positions=positions,
    )
    encoder, plain, windowed = model.encoder.token_mixers + model.token_mixers
    assert "position_bias" not in plain
    kind = {"alibi": ALiBi, "relative_bias": RelativeBias}[positions]
    assert type(encoder.position_bias) is type(windowed.position_bias) is kind
    after, before = (mx.array([[[distance]]]) for distance in (5, -5))
    if positions == "relative_bias":
        # causal attention has no buckets for what comes after
        now = mx.array([[[0]]])
        assert mx.array_equal(windowed.position_bias(after), windowed.position_bias(now))
        assert not mx.array_equal(encoder.position_bias(after), encoder.position_bias(before))
    whole, _ = model(TOKENS, TOKENS)
    memory, state, parts = model.encode(TOKENS), None, []
    for n in range(5):
        logits, state = model.decode(TOKENS[:, n : n + 1], memory, state)
        parts.append(logits)
    assert relative_error(mx.concatenate(parts, axis=1), whole) <= TOLERANCE[mx.float32]


def _able_with_scores() -> set[str]:
    names = set()
    for name, mixer in token_mixers().items():
        task = "causal_lm" if mixer.causal else "masked_lm"
        with suppress(UnsupportedModelError):
            build(token_mixer=name, task=task, positions="alibi")
            names.add(name)
    return names


def test_mixers_with_scores_take_biases() -> None:
    with_argument = {
        name
        for name, mixer in token_mixers().items()
        if "position_bias" in inspect.signature(mixer.__init__).parameters
    }
    assert _able_with_scores() == with_argument >= {"gqa", "multi_head_attention"}


@pytest.mark.parametrize("mixer", ["mlgru", "gqa", "reformer"])
def test_reversible_blocks_go_on_with_the_state(mixer: str) -> None:
    model = build(token_mixer=mixer, block="reversible", positions="learned")
    assert all(isinstance(block, ReversibleBlock) for block in model.blocks)
    whole, _ = model(TOKENS)
    # the way of training, which keeps nothing
    assert relative_error(model.logits(model.text_hidden(TOKENS)), whole) <= TOLERANCE[mx.float32]
    state, parts = None, []
    for part in (TOKENS[:, :2], TOKENS[:, 2:3], TOKENS[:, 3:]):
        logits, state = model(part, state)
        parts.append(logits)
    tolerance = 2e-2 if mixer == "reformer" else TOLERANCE[mx.float32]
    assert relative_error(mx.concatenate(parts, axis=1), whole) <= tolerance


def test_states_by_position_of_reversible_blocks() -> None:
    """A caller may take tokens back, of recurrent mixers too."""
    model = build(token_mixer=["mlgru", "gqa"], block="reversible")
    _, state = model.hidden(TOKENS[:1, :2])
    _, both = model.hidden(TOKENS[:1, 2:5], state, by_position=True)
    _, want = model.hidden(TOKENS[:1, 2:4], state)
    got, wanted = (dict(tree_flatten(each)) for each in (both[0].states[1], want[0]))
    assert got.keys() == wanted.keys() and wanted
    for name, array in wanted.items():
        assert relative_error(got[name], array) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "classifier"])
def test_gradients_of_reversible_models_are_those_of_stored_activations(task: str) -> None:
    mixer = {"name": "multi_head_attention", "num_heads": 4}
    model = build(token_mixer=mixer, task=task, block="reversible", initializer_range=0.3)
    read = model.text_hidden if task == "causal_lm" else model.hidden

    def loss(model: TokenModel) -> mx.array:
        return mx.sin(model.logits(read(TOKENS))).sum()

    got = dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1]))
    model.transform = lambda x, context: model.run(x, model.init_state(2), context)[0]
    want = dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1]))
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) <= GRADIENT_TOLERANCE, name


def test_linears_are_of_the_class() -> None:
    for kind in ("dense", "ternary"):
        model = build(token_mixer="gla", linear_class=kind)
        ternary = [name for name, m in model.named_modules() if isinstance(m, BitLinear)]
        assert bool(ternary) == (kind == "ternary")
        assert all(name.startswith("blocks.") for name in ternary)


def test_the_description_is_read_back() -> None:
    values = SIZES | {
        "token_mixer": ["mlgru", {"name": "gqa", "num_heads": 4}],
        "channel_mixer": {"name": "feed_forward", "activation": "gelu"},
        "task": "encoder_decoder",
        "encoder_token_mixer": "fnet",
        "norm": "layer_norm",
        "norm_order": "post",
        "positions": "learned",
        "labels": ["a", "b", "c"],
        "scale_embedding": True,
        "eos_token_id": 2,
    }
    config = METAFORMER.config.from_hub(values)
    assert METAFORMER.config.from_hub(config.to_hub()) == config
    written = config.to_hub() | {"encoder_token_mixer": "fnet"}
    assert {name: written[name] for name in values} == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'token_mixer' must be given"),
        ({"token_mixer": []}, "'token_mixer' must name at least one mixer"),
        ({"token_mixer": 3}, "'token_mixer' must be the name of a mixer"),
        (
            {"token_mixer": "attention"},
            "those that follow but got 'attention': attention_sink [(]",
        ),
        ({"token_mixer": {"name": "gqa", "heads": 4}}, "must be among num_heads, .* but got heads"),
        ({"token_mixer": {"name": "gqa", "cache": 4}}, "but got cache"),
        (
            {"token_mixer": "gqa", "channel_mixer": {"name": "swiglu", "hidden_dims": 4}},
            "but got hidden_dims",
        ),
        (
            {"token_mixer": {"name": "gqa", "num_heads": 5}},
            "options of gqa do not fit: .*must divide",
        ),
        ({"token_mixer": {"name": "gqa", "num_heads": 2**40}}, "a number of at most 1048576"),
        ({"token_mixer": {"name": "gqa", "num_heads": [4]}}, "must be a word, or a number"),
        ({"token_mixer": "mlgru", "task": "masked_lm"}, "must be bidirectional but mlgru cannot"),
        ({"token_mixer": "sima"}, "must be causal but sima cannot"),
        ({"token_mixer": "gqa", "task": "talk"}, "'task' must be one of causal_lm, .* got 'talk'"),
        ({"token_mixer": "gqa", "channel_mixer": "mlp"}, "a channel mixer must be one of"),
        (
            {"token_mixer": "gqa", "task": "encoder_decoder", "memory_mixer": "gqa"},
            "'memory_mixer' must read a second sequence but gqa cannot",
        ),
        (
            {"token_mixer": "mlgru", "hidden_size": 33, "positions": "sinusoidal"},
            "'hidden_size' must be even",
        ),
        (
            {"token_mixer": ["gqa", "fnet"], "task": "masked_lm", "positions": "alibi"},
            "'positions' must not be alibi for fnet, which has no scores",
        ),
        (
            {"token_mixer": "mlgru", "positions": "relative_bias"},
            "'positions' must not be relative_bias for mlgru, which has no scores",
        ),
        (
            {"token_mixer": "gqa", "block": "reversible", "norm_order": "post"},
            "'block' must be residual with 'norm_order' 'post' but got 'reversible'",
        ),
        (
            {"token_mixer": "gqa", "block": "reversible", "task": "encoder_decoder"},
            "'block' must be residual with 'task' 'encoder_decoder' but got 'reversible'",
        ),
        (
            {"token_mixer": "gqa", "scale_embedding": True},
            "'scale_embedding' must be false where no positions are added",
        ),
        (
            {"token_mixer": "gqa", "labels": ["a", "a"]},
            "'labels' must be a list of different names",
        ),
        (
            {"token_mixer": "gqa", "labels": ["a", "b"], "num_labels": 3},
            "'num_labels' must be the number of 'labels', 2, but got 3",
        ),
    ],
)
def test_what_does_not_go_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build(**values)


def test_the_page_on_token_mixers_describes_a_model() -> None:
    page = sections(ROOT / "mlx_mmfree" / "token_mixers" / "README.md")
    [text] = next(part for part in page if part.title == "A model of any mixers").blocks("yaml")
    model = METAFORMER.build(METAFORMER.config.from_hub(yaml.safe_load(text)))
    names = [type(mixer).__name__ for mixer in model.token_mixers]
    assert names == ["MLGRU", "MLGRU", "MLGRU", "SlidingWindowAttention"] * 2
    assert model.blocks[0].token_mixer.is_causal
