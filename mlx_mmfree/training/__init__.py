"""Training: one loop for runs from texts, fine-tuning and distillation, with data and checkpoints."""

from .corpus.mixture import Stage as Stage
from .fine_tuning.lora import lora as lora
from .fine_tuning.settings import FineTuneSettings as FineTuneSettings
from .loop import train_model as train_model
from .results import read_log as read_log
from .settings import Settings as Settings
from .settings import read_settings as read_settings
