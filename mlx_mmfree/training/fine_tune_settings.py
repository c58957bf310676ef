"""The settings of a fine-tuning run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import TrainingError
from .data_parallel import DEFAULT_TIMEOUT_S
from .fine_tune_rules import check_rules
from .loop_settings import LoopSettings
from .optimizer import OPTIMIZERS
from .precision import compute_dtype
from .samples import Features
from .yaml_values import check_keys, checked_values, names_in

_OF_PREFERENCES = ("train_mode", "beta", "loss_type", "chosen_feature", "rejected_feature")
_WITHOUT_INFLUENCE = (
    "data",
    "adapter_path",
    "iters",
    "teacher",
    "steps_per_report",
    "save_every",
    "test_batches",
    "resume_adapter_file",
    "patience",
    "clear_cache_threshold",
    "grad_checkpoint",
    "process_timeout_s",
    "reference_model_path",
)


@dataclass(frozen=True)
class FineTuneSettings:
    """One fine-tuning run. Names and defaults are those of mlx-lm where it has them.

    Attributes:
        data: Folder with train.jsonl, valid.jsonl and test.jsonl, or a dataset of the Hub; for a model
            of images a folder with train, valid and test, each a folder of classes or an .npz file.
        adapter_path: Folder of the run, for the adapter or model, the checkpoint, the log and the loss
            curve.
        fine_tune_type: What is trained: lora or dora adapters, or with full the weights themselves.
            Ternary weights are trained through float master weights.
        train_mode: What is learned: the samples themselves with sft, or with dpo and orpo to prefer
            the chosen to the rejected answers of pairs.
        beta: With dpo, how closely the model stays to the reference; with orpo, the weight of the odds
            ratio.
        loss_type: The loss of dpo.
        reference_model_path: Folder or Hub repository of the reference model of dpo. Default: the model
            as it is when the run begins.
        optimizer: Name of the optimizer.
        optimizer_config: Further options, by the name of the optimizer.
        learning_rate: Learning rate, unless the YAML file has a schedule.
        lr_schedule: `name`, `arguments`, `warmup` and `warmup_init` of a learning-rate schedule.
        iters: Number of optimizer steps.
        batch_size: Number of rows in a batch.
        grad_accumulation_steps: Number of batches in an optimizer step.
        clip_norm: Largest norm of the gradient. 0 turns clipping off.
        max_seq_length: Largest number of tokens of a sample. Longer ones are cut at the end.
        mask_prompt: Learn only completions, or only last messages.
        pack: Put several short samples into a row of max_seq_length tokens. They do not see each
            other.
        num_layers: Number of layers to train, counted from the last. -1 trains all.
        rank: Rank of the adapters.
        scale: Factor of the adapters' output.
        dropout: Dropout of the adapters' input.
        keys: Patterns of the names of what is trained, within a layer (self_attn.q_proj) or in the
            model (lm_head). Default: everything in the layers.
        teacher: Folder or Hub repository of a model with the same vocabulary. The loss also compares
            the predictions with its predictions.
        teacher_weight: Weight of the divergence from the teacher, added to the loss on the data.
        teacher_temperature: Divisor of the logits of both models in the divergence.
        teacher_top_k: Compare only this many of the teacher's likeliest tokens. Default: all.
        quantization_warmup: Steps over which ternary layers change from float to quantised in full
            fine-tuning.
        val_batches: Number of batches in a validation. -1 takes all.
        test_batches: Number of batches in the test. -1 takes all.
        steps_per_report: Steps between two lines of the log.
        steps_per_eval: Steps between two validations.
        save_every: Steps between two checkpoints.
        patience: End the run after this many validations in a row without a better loss. 0 turns this
            off.
        resume_adapter_file: File adapters.safetensors to begin with.
        grad_checkpoint: Recompute each block in the backward pass, which saves memory.
        clear_cache_threshold: Clear MLX's cache after a step that leaves it larger than this.
        process_timeout_s: Seconds that a process waits for the others before it gives up.
        dtype: Float type to compute in. With adapters it is that of the base model, and by default the
            checkpoint's. Full fine-tuning computes in it where the device is fast at it, and keeps
            float32 master weights.
        seed: Seed of the adapters, the order of the samples and dropout.
        prompt_feature: Key of the prompt in the data.
        completion_feature: Key of the completion.
        chat_feature: Key of the messages.
        text_feature: Key of the text.
        chosen_feature: Key of the answer that is preferred.
        rejected_feature: Key of the other answer.
    """

    data: str
    adapter_path: str = "adapters"
    fine_tune_type: str = "lora"
    train_mode: str = "sft"
    beta: float = 0.1
    loss_type: str = "sigmoid"
    reference_model_path: str | None = None
    optimizer: str = "adam"
    optimizer_config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    learning_rate: float = 1e-5
    lr_schedule: Mapping[str, Any] | None = None
    iters: int = 1000
    batch_size: int = 4
    grad_accumulation_steps: int = 1
    clip_norm: float = 0.0
    max_seq_length: int = 2048
    mask_prompt: bool = False
    pack: bool = False
    num_layers: int = 16
    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    keys: tuple[str, ...] | None = None
    teacher: str | None = None
    teacher_weight: float = 1.0
    teacher_temperature: float = 1.0
    teacher_top_k: int | None = None
    quantization_warmup: int = 0
    val_batches: int = 25
    test_batches: int = 500
    steps_per_report: int = 10
    steps_per_eval: int = 200
    save_every: int = 100
    patience: int = 0
    resume_adapter_file: str | None = None
    grad_checkpoint: bool = False
    clear_cache_threshold: int | None = None
    process_timeout_s: float = DEFAULT_TIMEOUT_S
    dtype: str | None = None
    seed: int = 0
    prompt_feature: str = "prompt"
    completion_feature: str = "completion"
    chat_feature: str = "messages"
    text_feature: str = "text"
    chosen_feature: str = "chosen"
    rejected_feature: str = "rejected"

    def __post_init__(self) -> None:
        check_rules(self)

    @property
    def is_full(self) -> bool:
        """Whether the weights themselves are trained."""
        return self.fine_tune_type == "full"

    @property
    def compute_dtype(self) -> mx.Dtype | None:
        """The dtype that steps compute in; `None` for that of the base model."""
        return compute_dtype(self.dtype or "float32") if self.is_full else None

    @property
    def learns_preferences(self) -> bool:
        """Whether the samples are pairs of answers."""
        return self.train_mode != "sft"

    @property
    def preference_options(self) -> dict[str, Any]:
        """The options of the loss of preferences."""
        return {"beta": self.beta, "loss_type": self.loss_type}

    @property
    def features(self) -> Features:
        """The keys under which the lines of the data hold their parts."""
        return Features(
            prompt=self.prompt_feature,
            completion=self.completion_feature,
            chat=self.chat_feature,
            text=self.text_feature,
            chosen=self.chosen_feature,
            rejected=self.rejected_feature,
        )

    def loop(self, record: dict[str, Any]) -> LoopSettings:
        """The settings of the loop; `record` describes the model and the data of the run."""
        return LoopSettings(
            folder=Path(self.adapter_path),
            steps=self.iters,
            seed=self.seed,
            clip_norm=self.clip_norm,
            steps_per_report=self.steps_per_report,
            steps_per_eval=self.steps_per_eval,
            save_every=self.save_every,
            patience=self.patience,
            quantization_warmup=self.quantization_warmup,
            validates_first=True,
            dtype=self.compute_dtype,
            clear_cache_bytes=self.clear_cache_threshold,
            record=self.record() | record,
        )

    def record(self) -> dict[str, Any]:
        """All plain values that decide the course of the run."""
        record = asdict(self)
        for name in (*_WITHOUT_INFLUENCE, *(() if self.learns_preferences else _OF_PREFERENCES)):
            del record[name]
        # the digest of the weights tells the dtypes of a base model apart
        if not self.is_full or self.dtype in (None, "float32"):
            del record["dtype"]
        return record


def fine_tune_settings(values: Mapping[str, Any], source: str) -> FineTuneSettings:
    """The settings made of plain values from a YAML file and from flags.

    Args:
        values: The fields of `FineTuneSettings`. `lora_parameters` may hold `rank`, `scale`, `dropout`
            and `keys`, as in mlx-lm; the same names outside of it win.
        source: Where the values come from, as messages name it.

    Raises:
        TrainingError: A key is unknown or missing, or a value is wrong.
    """
    values = {name: value for name, value in values.items() if value is not None}
    nested = values.pop("lora_parameters", {})
    if not isinstance(nested, Mapping) or not nested.keys() <= {"rank", "scale", "dropout", "keys"}:
        raise TrainingError(
            f"[lora] 'lora_parameters' may hold only rank, scale, dropout and keys but got "
            f"{nested!r:.200}."
        )
    values = {**nested, **values}
    check_keys(values, FineTuneSettings, source, "lora")
    if "data" not in values:
        raise TrainingError(
            "[lora] 'data' must be given: a folder with train.jsonl, or a dataset of the Hub."
        )
    try:
        for name in ("optimizer_config", "lr_schedule"):
            if not isinstance(values.get(name, {}), Mapping):
                raise ValueError(f"'{name}' must be a mapping but got {values[name]!r:.80}")
        for name, options in values.get("optimizer_config", {}).items():
            if name not in OPTIMIZERS or not isinstance(options, Mapping):
                raise ValueError(
                    f"'optimizer_config' must hold mappings under the names {', '.join(OPTIMIZERS)} but "
                    f"holds {options!r:.60} under {name!r:.60}"
                )
        if "keys" in values:
            values["keys"] = names_in(values["keys"], "keys")
        return FineTuneSettings(**checked_values(values, FineTuneSettings))
    except ValueError as error:
        raise TrainingError(f"[lora] a value of {source} is wrong: {error}.") from error
