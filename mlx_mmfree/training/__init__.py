"""Training: one loop for runs from texts, fine-tuning and distillation, with data and checkpoints."""

from .loop import train_model as train_model
from .settings import Settings as Settings
from .settings import read_settings as read_settings
