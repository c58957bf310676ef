"""Times models of images of timm, on PyTorch."""

from functools import partial
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file

from ..files.checkpoint_files import CONFIG_FILE, WEIGHTS_FILE
from ..files.reading import read_json_object
from ..models.parts.architecture import find_described
from .benchmark_images import WARM_UP, ImageSettings, Run, images
from .benchmark_rounds import elapsed


def run(folder: Path, settings: ImageSettings, threads: int) -> Run:
    """Times passes through the model of a folder, for each number of images at a time."""
    torch.set_num_threads(threads)
    described = read_json_object(folder / CONFIG_FILE)
    config = find_described(described).config.from_hub(described)
    model = timm.create_model(
        config.architecture,
        num_classes=config.num_classes,
        **described.get("model_args", {}),
    )
    model.load_state_dict(load_file(folder / WEIGHTS_FILE))
    model.eval()
    given = images(max(settings.batch_sizes), config.image_size, config.input_channels)
    seconds = {}
    with torch.inference_mode():
        whole = torch.from_numpy(given).permute(0, 3, 1, 2).contiguous()
        for batch_size in settings.batch_sizes:
            batch = whole[:batch_size]
            times = [elapsed(partial(model, batch)) for _ in range(settings.rounds + WARM_UP)]
            seconds[str(batch_size)] = times[WARM_UP:]
        logits = model(whole[:1])[0]
    return Run(seconds, logits.tolist())
