"""Runs tasks of lm-evaluation-harness (EleutherAI, package `lm_eval`) on this library's models."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, install_extra
from ..generation import Sampler
from ..generation.decode import PREFILL_STEP_SIZE
from ..models import Decoder
from .harness_adapter import HarnessAdapter

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM


def harness_model(
    model: Decoder,
    tokenizer: Any,
    *,
    batch_size: int = 8,
    max_tokens: int | None = None,
    sampler: Sampler | None = None,
    template_variables: Mapping[str, Any] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
) -> "TemplateLM":
    """A model in the form that `lm_eval.simple_evaluate` takes.

    Args:
        model: The model.
        tokenizer: The tokenizer of the model.
        batch_size: Number of texts read at a time.
        max_tokens: Largest number of tokens of an answer; `None` takes that of the task, or 256.
        sampler: Chooses the tokens of answers; `None` takes that of the task, or the likeliest token.
        template_variables: Further variables of the chat template.
        prefill_step_size: Number of tokens of each text read at a time.

    Raises:
        UsageError: The package `lm_eval` is not installed.
    """
    return _adapter_class()(
        model,
        tokenizer,
        batch_size=batch_size,
        max_tokens=max_tokens,
        sampler=sampler,
        template_variables=dict(template_variables or {}),
        prefill_step_size=prefill_step_size,
    )


@cache
def _adapter_class() -> type:
    """The adapter as a class of the harness, which exists only where the package is installed."""
    check_installed()
    from lm_eval.api.model import TemplateLM

    return type("Adapter", (HarnessAdapter, TemplateLM), {})


def evaluate_tasks(
    model: "TemplateLM",
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    seed: int = 123,
    **options: Any,
) -> dict[str, Any]:
    """Runs tasks of lm-evaluation-harness and returns its results.

    Args:
        model: The model, from `harness_model`.
        tasks: Names of tasks or groups of tasks.
        include_path: A folder with further tasks, which win over those of the package.
        seed: Seed of all random generators that a task may use.
        options: Further arguments of `lm_eval.simple_evaluate`, such as `num_fewshot` and `limit`.

    Raises:
        UsageError: A task is unknown, or the package `lm_eval` is not installed.
    """
    check_installed()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    paths = None if include_path is None else str(include_path)
    manager = TaskManager(include_path=paths)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise UsageError(
            f"[evaluate] 'tasks' must be names that lm-evaluation-harness knows but got "
            f"{', '.join(map(repr, unknown))}. 'lm_eval ls tasks' lists them, and 'include_path' adds "
            "further ones."
        )
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    results: dict[str, Any] = simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=manager,
        **dict.fromkeys(seeds, seed),
        **options,
    )
    return results


def check_installed() -> None:
    """Checks that the package `lm_eval` is installed.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise UsageError(
            "[evaluate] the package lm-evaluation-harness must be installed but is not. "
            + install_extra("eval")
        ) from error
