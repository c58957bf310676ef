"""Reads pictures from untrusted files and prepares them as the checkpoint of a model asks."""

from .picture_file import read_picture as read_picture
from .processor import ImageProcessor as ImageProcessor
