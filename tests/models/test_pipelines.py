"""The task that a record names is the one of the models that it builds."""

import pytest

from mlx_mmfree.models import find
from mlx_mmfree.models.parts.architecture import known_model_types


@pytest.mark.parametrize("model_type", known_model_types())
def test_the_record_and_the_model_name_one_task(model_type: str) -> None:
    architecture = find(model_type)
    config = architecture.config.from_hub(dict(architecture.tiny))
    assert architecture.build(config).pipeline == architecture.pipeline(config)
