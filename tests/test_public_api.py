"""The public names and signatures, frozen: a change here breaks users."""

import inspect
import re

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
_SETTINGS = (
    "(data, valid_share=0.0, adapter_path='adapters', fine_tune_type='lora', train_mode='sft', "
    "beta=0.1, loss_type='sigmoid', reference_model_path=None, num_generations=8, "
    "max_completion_length=256, temperature=1.0, num_iterations=1, epsilon=0.2, "
    "epsilon_high=None, grpo_loss_type='grpo', scale_rewards='group', reward_functions_file=None, "
    "reward_functions=None, reward_weights=None, reward_timeout_s=60.0, "
    "optimizer_config=<factory>, learning_rate=1e-05, lr_schedule=None, iters=1000, "
    "grad_accumulation_steps=1, max_seq_length=2048, mask_prompt=False, pack=False, "
    "num_layers=16, rank=8, scale=20.0, dropout=0.0, keys=None, val_batches=25, test_batches=500, "
    "resume_adapter_file=None, dtype=None, chat_template=None, prompt_feature='prompt', "
    "completion_feature='completion', chat_feature='messages', text_feature='text', "
    "chosen_feature='chosen', rejected_feature='rejected', answer_feature='answer', *, "
    "batch_size=4, optimizer='adam', clip_norm=0.0, grad_checkpoint=False, steps_per_report=10, "
    "steps_per_eval=200, save_every=100, seed=0, teacher_weight=1.0, teacher_temperature=1.0, "
    "teacher_top_k=None, teacher=None, quantization_warmup=0, patience=0, "
    "clear_cache_threshold=None, process_timeout_s=300.0)"
)
_LOAD = (
    "(path_or_repo, revision=None, dtype=None, packed=True, latent=None, rebuild_masters=False, "
    "adapter_path=None)"
)
SIGNATURES = {
    "FineTuneSettings": _SETTINGS,
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
        assert re.search("^(Args|Attributes):", documentation, re.MULTILINE), name


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
