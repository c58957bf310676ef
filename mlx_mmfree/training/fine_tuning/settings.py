"""The settings of a fine-tuning run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import mlx.core as mx

from ...arguments import checks_names
from ...errors import TrainingError
from ...hub.adapters.adapter_folder import adapter_options
from ..losses.grpo_loss import GRPOLoss
from ..optimizer import OPTIMIZERS, SCHEDULES, named_optimizer, named_schedule
from ..precision import ADAPTER_DTYPES, COMPUTE_DTYPES, compute_dtype
from ..run_settings import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    LongSettings,
    LoopSettings,
    Rule,
    checked,
    listed,
    named_mapping,
    names_in,
    setting,
)
from ..samples import Features
from .preferences import LossType, TrainMode, is_mode

COMMAND_KEYS: dict[str, type] = {
    "model": str,
    "train": bool,
    "test": bool,
    "report_to": str,
    "project_name": str,
    "rebuild_masters": bool,
}
"""The keys of the YAML file that are the command's own, and their types."""

KINDS = ("lora", "dora", "full")
GRPO = "grpo"
TRAIN_MODES = ("sft", *get_args(TrainMode), GRPO)
LOSS_TYPES = get_args(LossType)

_AT_LEAST_2 = Rule("at least 2", lambda value: value >= 2)
_MANY_OR_ALL = Rule("positive, or -1 for all,", lambda value: value == -1 or value > 0)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    return tuple(checked(name, entry, float) for entry in listed(value, name))


def _options(name: str, value: Any) -> dict[str, Any]:
    values = named_mapping(name, value)
    for optimizer, options in values.items():
        if optimizer not in OPTIMIZERS or not isinstance(options, Mapping):
            raise ValueError(
                f"'{name}' must hold mappings under the names {', '.join(OPTIMIZERS)} but holds "
                f"{options!r:.60} under {optimizer!r:.60}"
            )
    return values


@dataclass(frozen=True)
class FineTuneSettings(LongSettings):
    """One fine-tuning run: the keys of the YAML file of `mmfree lora`, most of which are flags too.

    Names and defaults are as in mlx-lm where it has them.

    Raises:
        TrainingError: A value is out of its bounds or of another type, or values do not fit together.
        TypeError: An argument is misspelt, or `data` is missing.

    Example:
        >>> settings = FineTuneSettings(data="data", iters=200, mask_prompt=True)
        >>> settings.batch_size, settings.learning_rate
        (4, 1e-05)
    """

    command: ClassVar[str] = "lora"
    further_keys: ClassVar[Collection[str]] = (*COMMAND_KEYS, "lora_parameters")

    data: str = setting(
        "Folder with train, valid and test as .jsonl, .json, .csv, .tsv or .parquet, a folder of .txt "
        "and .md, or a dataset of the Hub; or the training samples alone: a file, or owner/name:split "
        "of the Hub. For an image model a folder with train, valid and test, each a folder of classes "
        "or an .npz file.",
        counts=False,
        holds="model",
    )
    valid_share: float = setting(
        "Share of the training samples to validate on instead, where the data has none for it.",
        0.0,
        SHARE,
    )
    adapter_path: str = setting(
        "Folder of the run, for the adapter or model, the checkpoint, the log and the loss curve.",
        "adapters",
        counts=False,
        also=("output",),
        holds="path",
    )
    fine_tune_type: str = setting(
        "What is trained: lora or dora adapters, or with full the weights themselves. Ternary "
        "weights are trained through float master weights.",
        "lora",
        Rule.one_of(*KINDS),
    )
    train_mode: str = setting(
        "What is learned: the samples themselves with sft; with dpo and orpo to prefer the chosen to "
        "the rejected answers of pairs; with grpo to answer prompts so that rewards rise.",
        "sft",
        Rule.one_of(*TRAIN_MODES),
        of_preferences=True,
    )
    beta: float = setting(
        "With dpo, how closely the model stays to the reference; with orpo, the weight of the odds "
        "ratio; with grpo, the weight of the divergence from the reference, 0 for none.",
        0.1,
        NOT_NEGATIVE,
        of_preferences=True,
        modes=("dpo", "orpo", GRPO),
    )
    loss_type: str = setting(
        "The loss of dpo.", "sigmoid", Rule.one_of(*LOSS_TYPES), of_preferences=True, modes=("dpo",)
    )
    reference_model_path: str | None = setting(
        "Folder or Hub repository of the reference model of dpo or grpo. Default: the model as it is "
        "when the run begins.",
        None,
        counts=False,
        holds="model",
        modes=("dpo", GRPO),
    )
    num_generations: int = setting(
        "With grpo, the answers of a group: those to one prompt, which are compared.",
        8,
        _AT_LEAST_2,
        also=("group_size",),
        modes=(GRPO,),
    )
    max_completion_length: int = setting(
        "With grpo, the most tokens of an answer.", 256, POSITIVE, modes=(GRPO,)
    )
    temperature: float = setting(
        "With grpo, the sampling temperature of the answers and of their probabilities.",
        1.0,
        POSITIVE,
        modes=(GRPO,),
    )
    num_iterations: int = setting(
        "With grpo, the optimizer steps that learn from one set of answers.",
        1,
        POSITIVE,
        modes=(GRPO,),
    )
    epsilon: float = setting(
        "With grpo, how far the ratio of probabilities counts below 1.",
        0.2,
        POSITIVE,
        modes=(GRPO,),
    )
    epsilon_high: float | None = setting(
        "With grpo, how far it counts above 1. Default: as far as below.",
        None,
        POSITIVE,
        modes=(GRPO,),
    )
    grpo_loss_type: str = setting(
        "With grpo, what tokens are averaged over: each answer (grpo), the batch (bnpo), or "
        "max_completion_length (dr_grpo).",
        "grpo",
        Rule.one_of(*get_args(GRPOLoss)),
        modes=(GRPO,),
    )
    scale_rewards: str = setting(
        "With grpo, whether rewards are divided by their deviation in the group, or by none.",
        "group",
        Rule.one_of("group", "none"),
        modes=(GRPO,),
    )
    reward_functions_file: str | None = setting(
        "With grpo, a Python file with the functions that give rewards.",
        None,
        counts=False,
        holds="path",
        modes=(GRPO,),
    )
    reward_functions: tuple[str, ...] | None = setting(
        "With grpo, the functions that give rewards: of the file, or exact_match, number and "
        "json_schema, which compare with the answer in the data. Default: all of the file, or "
        "exact_match.",
        None,
        reader=names_in,
        modes=(GRPO,),
    )
    reward_weights: tuple[float, ...] | None = setting(
        "With grpo, the weight of each function. Default: 1.", None, reader=_numbers, modes=(GRPO,)
    )
    reward_timeout_s: float = setting(
        "With grpo, the seconds that a function of the file may take for the answers of a step.",
        60.0,
        POSITIVE,
        counts=False,
        modes=(GRPO,),
    )
    optimizer: str = setting("Name of the optimizer.", "adam", Rule.one_of(*OPTIMIZERS))
    optimizer_config: Mapping[str, Mapping[str, Any]] = setting(
        "Further options, by the name of the optimizer.",
        factory=dict,
        reader=_options,
        has_flag=False,
    )
    learning_rate: float = setting(
        "Learning rate, unless the YAML file has a schedule.", 1e-5, POSITIVE
    )
    lr_schedule: Mapping[str, Any] | None = setting(
        "`name`, `arguments`, `warmup` and `warmup_init` of a learning-rate schedule.",
        None,
        reader=named_mapping,
        has_flag=False,
    )
    iters: int = setting(
        "Number of optimizer steps.", 1000, POSITIVE, counts=False, also=("steps",)
    )
    grad_accumulation_steps: int = setting(
        "Number of batches in an optimizer step.", 1, POSITIVE, also=("accumulation_steps",)
    )
    max_seq_length: int = setting(
        "Largest number of tokens of a sample. Longer ones are cut at the end.",
        2048,
        _AT_LEAST_2,
        also=("sequence_length",),
    )
    mask_prompt: bool = setting(
        "Learn only completions, or only the last answers of conversations.", False
    )
    pack: bool = setting(
        "Put several short samples into a row of max_seq_length tokens. They do not see each "
        "other.",
        False,
    )
    num_layers: int = setting(
        "Number of layers to train, counted from the last. -1 trains all.", 16, _MANY_OR_ALL
    )
    rank: int = setting("Rank of the adapters.", 8, POSITIVE)
    scale: float = setting("Factor of the adapters' output.", 20.0)
    dropout: float = setting("Dropout of the adapters' input.", 0.0, SHARE)
    keys: tuple[str, ...] | None = setting(
        "Names or patterns of what is trained: q_proj, self_attn.*, lm_head. Default: everything in "
        "the layers.",
        None,
        reader=names_in,
    )
    quantization_warmup: int = setting(
        "Steps over which ternary layers change from float to quantised in full fine-tuning.",
        0,
        NOT_NEGATIVE,
    )
    val_batches: int = setting("Number of batches in a validation. -1 takes all.", 25, _MANY_OR_ALL)
    test_batches: int = setting(
        "Number of batches in the test. -1 takes all.", 500, _MANY_OR_ALL, counts=False
    )
    resume_adapter_file: str | None = setting(
        "File adapters.safetensors to begin with. The adapter_config.json beside it tells its type, "
        "rank, scale, layers and keys.",
        None,
        counts=False,
        holds="path",
    )
    dtype: str | None = setting(
        "Float type to compute in. With adapters it is the base model's, and by default the "
        "checkpoint's. Full fine-tuning computes in it where the device is fast at it, and keeps "
        "float32 master weights.",
        None,
        Rule.one_of(*ADAPTER_DTYPES),
    )
    chat_template: str | None = setting(
        "File with a chat template in place of the model's, which is saved beside the result.",
        None,
        counts=False,
        holds="path",
    )
    prompt_feature: str = setting("Key of the prompt in the data.", "prompt")
    completion_feature: str = setting("Key of the completion.", "completion")
    chat_feature: str = setting("Key of the messages.", "messages")
    text_feature: str = setting("Key of the text.", "text")
    chosen_feature: str = setting(
        "Key of the answer that is preferred.", "chosen", of_preferences=True
    )
    rejected_feature: str = setting("Key of the other answer.", "rejected", of_preferences=True)
    answer_feature: str = setting(
        "With grpo, the key of the answer in the data.", "answer", modes=(GRPO,)
    )
    batch_size: int = 4
    clip_norm: float = 0.0
    steps_per_eval: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        is_mapping = isinstance(self.optimizer_config, Mapping)
        self.check("optimizer_config", is_mapping, "a mapping by names of optimizers")
        options = self.optimizer_config.get(self.optimizer)
        named_optimizer(self.optimizer, self.learning_rate, options)
        dtypes = COMPUTE_DTYPES if self.is_full else ADAPTER_DTYPES
        rule = f"one of {', '.join(dtypes)} with {self.fine_tune_type}"
        self.check("dtype", self.dtype is None or self.dtype in dtypes, rule)
        if self.lr_schedule is not None:
            is_mapping = isinstance(self.lr_schedule, Mapping)
            self.check("lr_schedule", is_mapping, "a mapping with a name")
            name = self.lr_schedule.get("name")
            is_known = isinstance(name, str) and name in SCHEDULES
            self.check("lr_schedule", is_known, f"named one of {', '.join(SCHEDULES)}")
            named_schedule(self.lr_schedule)
        if self.teacher is None and self.teacher_top_k is not None:
            raise TrainingError(
                "[lora] 'teacher_top_k' must come with 'teacher' but came alone. Name a teacher."
            )
        if self.is_full and self.resume_adapter_file is not None:
            raise TrainingError(
                "[lora] 'resume_adapter_file' must be left out for full fine-tuning, which trains "
                "no "
                "adapter. Give the folder of the model to begin with as 'model'."
            )
        self._check_preferences()

    def _check_preferences(self) -> None:
        """Refuses settings of preferences without them, and what does not go with them."""
        self.check("beta", self.beta > 0 or self.train_mode == GRPO, "positive")
        if self.train_mode != "sft" and (self.pack or self.teacher is not None):
            name = "pack" if self.pack else "teacher"
            raise TrainingError(
                f"[lora] '{name}' must be left out with 'train_mode' {self.train_mode} but was given. "
                "It goes with 'train_mode' sft."
            )
        for each in self.declared():
            modes = each.metadata.get("modes", (self.train_mode,))
            if self.train_mode not in modes and getattr(self, each.name) != each.default:
                *others, last = modes
                named = f"{', '.join(others)} or {last}" if others else last
                raise TrainingError(
                    f"[lora] '{each.name}' must come with 'train_mode' {named} but got "
                    f"{self.train_mode!r}. Leave it out."
                )

    @property
    def is_full(self) -> bool:
        """True if the weights themselves are trained."""
        return self.fine_tune_type == "full"

    @property
    def compute_dtype(self) -> mx.Dtype | None:
        """The dtype that steps compute in; `None` for the base model's."""
        return compute_dtype(self.dtype or "float32") if self.is_full else None

    @property
    def learns_preferences(self) -> bool:
        """True if the samples are pairs of answers."""
        return is_mode(self.train_mode)

    @property
    def uses_reference(self) -> bool:
        """True if the run needs a reference model."""
        return self.train_mode == "dpo" or (self.train_mode == GRPO and self.beta > 0)

    @property
    def group_options(self) -> dict[str, Any]:
        """The options of a batch of groups."""
        return {
            "loss_type": self.grpo_loss_type,
            "max_completion_length": self.max_completion_length,
        }

    @property
    def group_loss_options(self) -> dict[str, Any]:
        """The options of the loss of a batch of groups."""
        return {
            "beta": self.beta,
            "epsilon": self.epsilon,
            "epsilon_high": self.epsilon_high,
            "temperature": self.temperature,
        }

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
        return self.loop_settings(
            Path(self.adapter_path),
            self.iters,
            validates_first=True,
            dtype=self.compute_dtype,
            record=self.record() | record,
        )

    def record(self) -> dict[str, Any]:
        record = super().record()
        del record["grad_checkpoint"]
        for each in self.declared():
            is_of_others = each.metadata.get("of_preferences") and self.train_mode == "sft"
            is_of_grpo = each.metadata.get("modes") == (GRPO,) and self.train_mode != GRPO
            if each.name in record and (is_of_others or is_of_grpo):
                del record[each.name]
        # the digest of the weights tells the dtypes of a base model apart
        if not self.is_full or self.dtype in (None, "float32"):
            del record["dtype"]
        return record


FineTuneSettings.__init__ = checks_names(FineTuneSettings.__init__)  # type: ignore[method-assign]


def fine_tune_settings(values: Mapping[str, Any], source: str) -> FineTuneSettings:
    """The settings made of plain values from a YAML file and from flags.

    Args:
        values: The fields of `FineTuneSettings`. `lora_parameters` may hold `rank`, `scale`, `dropout`
            and `keys`, as in mlx-lm; the same names outside of it win. What is not given of an adapter
            to begin with is taken from its configuration: type, rank, scale, layers and keys.
        source: Where the values come from, as messages name it.

    Raises:
        TrainingError: A key is unknown or missing, or a value is wrong.
        CheckpointError: The adapter to begin with has no configuration beside it.
    """
    values = {name: value for name, value in values.items() if value is not None}
    nested = values.pop("lora_parameters", {})
    if not isinstance(nested, Mapping) or not nested.keys() <= {"rank", "scale", "dropout", "keys"}:
        raise TrainingError(
            f"[lora] 'lora_parameters' may hold only rank, scale, dropout and keys but got "
            f"{nested!r:.200}."
        )
    values = {**nested, **values}
    file = values.get("resume_adapter_file")
    if isinstance(file, str) and values.get("fine_tune_type") != "full":
        values = adapter_options(file) | values
    return FineTuneSettings.made(values, source)
