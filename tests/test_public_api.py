"""The public names and signatures, frozen: a change here breaks users."""

import inspect

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import mlx_mmfree
from mlx_mmfree import MLGRU, BitLinear, SwiGLU

_GENERATE = (
    "max_tokens=100, sampler=greedy, processors=(), stop=(), extra_eos_tokens=(), {}"
    "prefill_step_size=2048{})"
)
_DRAFT = (
    ", draft_model=None, num_draft_tokens=3, prompt_progress_callback=None, is_answer=False, "
    "ngram_drafts=False"
)
_LOAD = (
    "(path_or_repo, revision=None, dtype=None, packed=True, latent=None, rebuild_masters=False, "
    "adapter_path=None)"
)
SIGNATURES = {
    "BitLinear": "(input_dims, output_dims, bias=False, *, norm_eps=None, rounding='half_even', "
    "quantize_activations=True)",
    "GQA": "(dims, *, num_heads=8, num_kv_heads=None, head_dim=None, linear=Linear, bias=False, "
    "output_bias=None, is_stacked=False, is_gated=False, rope=None, position_bias=None, "
    "norms=AttentionNorms(qk_eps=None, output_eps=None), "
    "is_causal=True, cache=KeyValueCache(window=None, sinks=0, quantization=None, "
    "quantization_start=0, step=1))",
    "MLGRU": "(dims, *, hidden_dims=None, linear=Linear, bias=False, stacking='none', "
    "norm_eps=1e-06, output_gate='norm', conv_size=0, share_conv=True)",
    "SwiGLU": "(dims, *, hidden_dims=None, linear=Linear, is_stacked=False, bias=False, "
    "norm_eps=None)",
    "batch_generate": "(model, tokenizer, prompts, *, "
    + _GENERATE.format("batch_size=32, ", ", progress=None, is_answer=False"),
    "embed": "(model, tokenizer, texts, *, pooling=None, prompt_name=None, progress=None)",
    "embed_tokens": "(model, tokens, valid=None, *, pooling=None)",
    "fuse": "(model, format)",
    "generate": "(model, tokenizer, prompt, *, "
    + _GENERATE.format("state=None, ", _DRAFT + ", verbose=False"),
    "load": _LOAD,
    "load_model": _LOAD,
    "load_plugin": "(source)",
    "load_tokenizer": "(path_or_repo, revision=None)",
    "lora": "(model, processor, settings, *, teacher=None, reference=None, callbacks=())",
    "make_processors": "(repetition_penalty=1.0, repetition_context_size=20, presence_penalty=0.0, "
    "frequency_penalty=0.0, logit_bias=None)",
    "make_sampler": "(temp=0.0, top_p=1.0, top_k=0, min_p=0.0, min_tokens_to_keep=1, "
    "xtc_probability=0.0, xtc_threshold=0.1, xtc_special_tokens=())",
    "save_model": "(path, model, tokenizer=None, *, overwrite=False)",
    "stream_generate": "(model, tokenizer, prompt, *, " + _GENERATE.format("state=None, ", _DRAFT),
}


class _Named:
    """A default that prints as its name."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _signature(name: str) -> str:
    """The signature without annotations; functions and classes as defaults by name."""
    signature = inspect.signature(getattr(mlx_mmfree, name))
    parameters = []
    for parameter in signature.parameters.values():
        default = parameter.default
        if default is not parameter.empty and hasattr(default, "__name__"):
            default = _Named(default.__name__)
        parameters.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def test_names_are_frozen() -> None:
    assert sorted(mlx_mmfree.__all__) == sorted([*SIGNATURES, "__version__"])
    assert all(hasattr(mlx_mmfree, name) for name in mlx_mmfree.__all__)


def test_signatures_are_frozen() -> None:
    assert {name: _signature(name) for name in SIGNATURES} == SIGNATURES


def test_every_public_name_is_documented() -> None:
    for name in SIGNATURES:
        documentation = inspect.getdoc(getattr(mlx_mmfree, name)) or ""
        assert "Args:" in documentation, name


def test_building_blocks_train_in_a_network_of_ones_own() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = MLGRU(16, linear=BitLinear)
            self.channels = SwiGLU(16, hidden_dims=32, linear=BitLinear)
            self.head = BitLinear(16, 4)

        def __call__(self, x: mx.array) -> mx.array:
            y, _ = self.mixer(x)
            return self.head(x + self.channels(x + y))

    mx.random.seed(0)
    network = Network()
    x = mx.random.normal((8, 6, 16))
    target = mx.array(np.random.default_rng(0).integers(0, 4, (8, 6)))
    step = nn.value_and_grad(
        network, lambda network, x: nn.losses.cross_entropy(network(x), target, reduction="mean")
    )
    losses = []
    for _ in range(60):
        loss, gradient = step(network, x)
        network.update(nn.utils.tree_map(lambda p, g: p - 0.3 * g, network.parameters(), gradient))
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
