"""Fine-tuning of a loaded model in one call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...arguments import check_list, check_model, check_tokenizer, checks_names
from ...errors import TrainingError
from ...images import ImageProcessor
from ...models import Decoder
from ..results import Callback
from .data import read_data
from .fine_tune import check_fine_tunable, fine_tune, prepare
from .preferences import with_reference
from .settings import FineTuneSettings


@checks_names
def lora(
    model: Decoder,
    processor: Any,
    settings: FineTuneSettings,
    *,
    teacher: Decoder | None = None,
    reference: Decoder | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    r"""Trains an adapter beside a model's weights, as `mmfree lora --train`, and leaves it on the model.

    .. math::
        y = W x + \alpha\,B^\top A^\top x

    with the weights :math:`W` as they are, which may be packed, and a product of low rank that is
    learned. The folder `settings.adapter_path` gets the adapter, a log and checkpoints. A run that was
    stopped goes on from there. With `fine_tune_type="full"` the weights themselves are trained, of a
    model that was loaded with `packed=False`.

    Source: Hu et al., arXiv 2106.09685; DoRA: Liu et al., arXiv 2402.09353.

    Args:
        model: The model, which is changed in place. It must have no adapter.
        processor: Its tokenizer, or an image model's image processor.
        settings: The run. `data` names the samples and `adapter_path` the folder to write.
        teacher: A model whose predictions are learned too, where `settings.teacher` names one.
        reference: Of DPO and GRPO, the model that the loss compares with; `None`: the model as it is.
        callbacks: Are called with each record, best model and checkpoint.

    Returns:
        What came of it: `step`, `tokens`, and with samples for validation `best_loss` and `best_step`.

    Raises:
        CheckpointError: The folder is the model's, or one of the two contains the other.
        TrainingError: The data cannot be read or has no samples, the loss is not finite, or the folder
            holds another run.
        TypeError: The model, its tokenizer or the settings are none, or an argument is misspelt.
        TrainingStopped: A signal ended the run early. Its state is saved.
        UnsupportedModelError: The architecture cannot be fine-tuned.

    Example:
        >>> from pathlib import Path
        >>> from mlx_mmfree import demo, load
        >>> from mlx_mmfree.training import FineTuneSettings
        >>> text = '{"prompt": "Who hopped?", "completion": " The frog."}'
        >>> size = Path("frogs.jsonl").write_text(text)
        >>> model, tokenizer = load(demo.path())
        >>> settings = FineTuneSettings(data="frogs.jsonl", iters=1, batch_size=1, num_layers=1)
        >>> lora(model, tokenizer, settings)["step"]
        1
        >>> adapted, _ = load(demo.path(), adapter_path="adapters")
    """
    check_model("lora", model, processor)
    if not isinstance(processor, ImageProcessor):
        check_tokenizer("lora", processor, "processor")
    if not isinstance(settings, FineTuneSettings):
        raise TypeError(
            f"[lora] 'settings' must be FineTuneSettings but got {type(settings).__name__}. Make them: "
            "FineTuneSettings(data=..., adapter_path=...)."
        )
    for name, other in (("teacher", teacher), ("reference", reference)):
        if other is not None:
            check_model("lora", other, name=name)
    check_list("lora", "callbacks", callbacks, "callbacks")
    if (settings.teacher is None) != (teacher is None):
        raise TrainingError(
            "[lora] 'teacher' must be given as a loaded model where the settings name one, and only "
            f"there, but got {'none' if teacher is None else 'one'}. Load it with load_model."
        )
    check_fine_tunable(model)
    data = read_data(settings, processor, model)
    prepare(model, settings)
    if settings.train_mode == "dpo":
        data = with_reference(
            {name: samples for name, samples in data.items() if name != "test"},
            model if reference is None else reference,
            batch_size=settings.batch_size,
            folder=Path(settings.adapter_path),
        )
    progress = fine_tune(
        model, processor, data, settings, teacher=teacher, reference=reference, callbacks=callbacks
    )
    measured = ("best_loss", "best_step") if "valid" in data else ()
    return {name: progress[name] for name in ("step", "tokens", *measured)}
