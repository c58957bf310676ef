"""The flags of the runs that are killed: every option of `mmfree train`, `lora` and `distil`."""

from typing import Any

from mlx_mmfree.models import find

Values = dict[str, Any]

TRAIN: Values = {
    "model": {
        "model_type": "hgrn_bit",
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
    },
    "stages": [{"until": 1, "weights": {"train.txt": 1}}],
    "valid": ["valid.txt"],
    "valid_tokens": 128,
    "steps": 60,
    "batch_size": 2,
    "sequence_length": 16,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "steps_per_report": 1,
    "steps_per_eval": 7,
    "save_every": 3,
}
_ATTENTION = {"num_attention_heads": 2, "model_type": "llama", "linear_class": "ternary"}
_MIXERS = {
    "model_type": "metaformer",
    "token_mixer": {"name": "multi_head_attention", "num_heads": 2},
    "positions": "sinusoidal",
}


def _of(name: str) -> Values:
    """The files of a task with samples."""
    return {
        "stages": [{"until": 1, "weights": {f"{name}/train.jsonl": 1}}],
        "valid": [f"{name}/valid.jsonl"],
    }


def image_model() -> Values:
    """The description of a small model of grey images with running statistics."""
    tiny = find("swiftformer").tiny
    return {
        "architecture": tiny["architecture"],
        "num_classes": 3,
        "model_args": tiny["model_args"] | {"in_chans": 1, "drop_path_rate": 0.2},
        "pretrained_cfg": {"input_size": [1, 32, 32], "mean": [0.5], "std": [0.5]},
    }


_IMAGES: Values = {
    "model": image_model(),
    "stages": [{"until": 1, "weights": {"images/train.npz": 1}}],
    "valid": ["images/valid.npz"],
}
TRAIN_OPTIONS: list[Values] = [
    {**_IMAGES, "random_shift": 1, "random_flip": True},
    {**_IMAGES, "model": None, "init_from": "classes", "new_head": True},
    {"model": TRAIN["model"] | _MIXERS | {"task": "masked_lm"}, "mlm_probability": 0.3},
    {
        "model": TRAIN["model"] | _MIXERS | {"task": "classifier", "num_labels": 2},
        **_of("labelled"),
        "text_column": "line",
        "label_column": "kind",
    },
    {
        "model": TRAIN["model"] | _MIXERS | {"task": "encoder_decoder", "scale_embedding": True},
        **_of("renamed"),
        "source_column": "question",
        "target_column": "answer",
    },
    {"model": TRAIN["model"] | _MIXERS | {"positions": "relative_bias", "block": "reversible"}},
    {"schedule": "inverse_sqrt", "learning_rate": None},
    {"label_smoothing": 0.1},
    {"model": TRAIN["model"] | _ATTENTION},
    {"model": TRAIN["model"] | {"linear_class": "dense"}},
    {
        "model": TRAIN["model"]
        | {"model_type": "bitnet", "rope_theta": 500000.0}
        | {"num_attention_heads": 2, "num_key_value_heads": 1}
    },
    {"init_from": "masters", "model": None},
    {"init_from": "latent", "model": None, "latent": True},
    {"init_from": "packed", "model": None, "rebuild_masters": True},
    {
        "stages": [
            {"until": 0.5, "weights": {"train.txt": 1, "more.txt": 2}},
            {"until": 1, "weights": {"more.txt": 1}},
        ]
    },
    {"order": "epochs"},
    {"valid": []},
    {"valid_tokens": 256},
    {"tokenizer": "tokenizer", "model": TRAIN["model"] | {"vocab_size": 518}},
    {"steps": 45},
    {"batch_size": 4},
    {"accumulation_steps": 2},
    {"sequence_length": 24},
    {"learning_rate": 3e-3},
    {"final_learning_rate": 0.5},
    {"warmup_steps": 20},
    {"weight_decay": 0.0},
    {"betas": [0.8, 0.99]},
    # arrays of this size have moments in 8 bits
    {"optimizer": "adamw8bit", "model": TRAIN["model"] | {"hidden_size": 64}},
    {"dtype": "bfloat16"},
    {"embedding_std": 0.5},
    {"dropout": 0.1},
    {"teacher": "teacher", "teacher_weight": 0.5, "model": TRAIN["model"] | {"vocab_size": 518}},
    {
        "teacher": "teacher",
        "teacher_temperature": 2.0,
        "teacher_top_k": 5,
        "model": TRAIN["model"] | {"vocab_size": 518},
    },
    {"clip_norm": 0.0},
    {"quantization_warmup": 30},
    {"grad_checkpoint": True},
    {"steps_per_report": 4},
    {"steps_per_eval": 5},
    {"save_every": 1},
    {"patience": 1, "steps_per_eval": 2},
    {"clear_cache_threshold": 1},
    {"process_timeout_s": 100.0},
    {"seed": 7},
]
"""Each as values of the YAML file; those with a value of `None` are left out."""

LORA: Values = {
    "model": "masters",
    "train": True,
    "data": "data",
    "iters": 40,
    "batch_size": 2,
    "steps_per_report": 1,
    "steps_per_eval": 7,
    "save_every": 3,
    "learning_rate": 1e-3,
}
_PAIRS = {"data": "pairs"}
GRPO: Values = {
    "train_mode": "grpo",
    "data": "problems",
    "iters": 12,
    "num_generations": 3,
    "max_completion_length": 6,
    "reward_functions_file": "rewards.py",
}
_SCHEDULE = {"name": "cosine_decay", "arguments": [1e-3, 40], "warmup": 5}
LORA_OPTIONS: list[Values] = [
    {"model": "classes", "data": "images"},
    {"fine_tune_type": "dora"},
    {"fine_tune_type": "full", "quantization_warmup": 20},
    {"fine_tune_type": "full", "model": "packed", "rebuild_masters": True},
    {"model": "packed"},
    {"train_mode": "dpo", "beta": 0.2, **_PAIRS},
    {"train_mode": "dpo", "loss_type": "ipo", **_PAIRS},
    {"train_mode": "dpo", "reference_model_path": "latent", **_PAIRS},
    {"train_mode": "orpo", **_PAIRS},
    {"optimizer": "adamw", "optimizer_config": {"adamw": {"weight_decay": 0.1}}},
    {"optimizer": "adamw8bit"},
    {"optimizer": "adafactor"},
    {"optimizer": "muon"},
    {"optimizer": "sgd"},
    {"fine_tune_type": "full", "dtype": "bfloat16"},
    {"dtype": "bfloat16"},
    {"lr_schedule": _SCHEDULE},
    {"learning_rate": 1e-4},
    {"iters": 30},
    {"batch_size": 6},
    {"grad_accumulation_steps": 2},
    {"clip_norm": 0.5},
    {"max_seq_length": 12},
    {"mask_prompt": True},
    {"pack": True, "max_seq_length": 64},
    {"num_layers": 1},
    {"rank": 2},
    {"scale": 4.0},
    {"dropout": 0.3},
    {"keys": ["attn.i_proj"]},
    {"teacher": "latent", "teacher_weight": 0.5, "teacher_temperature": 2.0},
    {"teacher": "latent", "teacher_top_k": 5},
    {"val_batches": 1},
    {"test_batches": 1, "test": True},
    {"steps_per_report": 4},
    {"steps_per_eval": 5},
    {"save_every": 1},
    {"patience": 1, "steps_per_eval": 2},
    {"resume_adapter_file": "adapters/adapters.safetensors"},
    {"grad_checkpoint": True},
    {"clear_cache_threshold": 1},
    {"process_timeout_s": 100.0},
    {"seed": 7},
    {"prompt_feature": "question", "completion_feature": "answer", "data": "renamed"},
    {"chat_feature": "talk", "data": "talks"},
    {"chat_feature": "talk", "data": "talks", "chat_template": "template.jinja"},
    {"valid_share": 0.25, "data": "unsplit"},
    {"text_feature": "line", "data": "lines"},
    GRPO,
    GRPO | {"num_generations": 2, "max_completion_length": 4, "temperature": 1.5},
    GRPO | {"num_iterations": 3, "epsilon": 0.1, "epsilon_high": 0.3, "save_every": 2},
    GRPO | {"num_iterations": 2, "grad_accumulation_steps": 2, "save_every": 1},
    GRPO | {"beta": 0.0, "grpo_loss_type": "dr_grpo", "scale_rewards": "none"},
    GRPO | {"reference_model_path": "latent", "grad_checkpoint": True},
    GRPO | {"fine_tune_type": "full", "beta": 0.02, "reward_timeout_s": 100.0},
    GRPO | {"reward_functions": ["short", "number"], "reward_weights": [0.5, 2.0]},
    GRPO | {"data": "renamed", "prompt_feature": "question"},
    {
        **GRPO,
        "data": "solved",
        "answer_feature": "solution",
        "reward_functions_file": None,
        "reward_functions": ["exact_match"],
    },
    {"train_mode": "orpo", "data": "renamed_pairs", "chosen_feature": "a", "rejected_feature": "b"},
]

DISTIL: Values = {
    "model": "teacher",
    "to": ["mlgru"],
    "data": ["train.txt"],
    "valid": ["valid.txt"],
    "valid_tokens": 64,
    "mixers_steps": 12,
    "hidden_steps": 12,
    "logits_steps": 12,
    "text_steps": 12,
    "batch_size": 2,
    "sequence_length": 16,
    "steps_per_report": 1,
    "steps_per_eval": 5,
    "save_every": 3,
}
DISTIL_OPTIONS: list[Values] = [
    {"model": "latent"},
    {"to": ["gla", {"name": "sliding_window_attention", "window": 8}]},
    {"to": "same", "ternary": True},
    {"to": "same", "ternary": True, "scales": "row", "model": "wide"},
    {"to": "same", "ternary": True, "scales": "group", "threshold": 0.7, "model": "wide"},
    {"to": "same", "ternary": True, "scales": "tensor", "scale_of_kept": True, "model": "wide"},
    {"to": "same", "ternary": True, "scales": "group", "rotation": 32, "model": "wide"},
    {"to": "same", "ternary": True, "inner_norms": True},
    {"to": "same", "ternary": True, "init_from": "teacher"},
    {"ternary": True, "quantization_warmup": 3},
    {"keep_layers": [1]},
    {"keep_embedding": True},
    {"random_mixers": True},
    {"data": ["train.txt", "more.txt"]},
    {"valid": []},
    {"valid_tokens": 128},
    {"mixers_steps": 0},
    {"mixers_rate": 1e-3},
    {"hidden_steps": 0},
    {"hidden_rate": 1e-3},
    {"logits_steps": 0},
    {"logits_rate": 1e-2},
    {"text_steps": 0},
    {"text_rate": 1e-3},
    {"teacher_weight": 0.5},
    {"teacher_temperature": 2.0},
    {"teacher_top_k": 5},
    {"teacher_top_k": 5, "cache_logits": True},
    {"batch_size": 3},
    {"accumulation_steps": 2},
    {"sequence_length": 24},
    {"final_learning_rate": 0.5},
    {"weight_decay": 0.1},
    {"optimizer": "adamw8bit"},
    {"clip_norm": 0.0},
    {"grad_checkpoint": True},
    {"steps_per_report": 4},
    {"steps_per_eval": 4},
    {"save_every": 1},
    {"dtype": "bfloat16"},
    {"seed": 7},
]
