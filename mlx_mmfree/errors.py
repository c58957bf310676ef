"""The exceptions that the library raises for mistakes a user can mend."""

import re

_CREDENTIALS = (
    # https://name:password@host, or with one slash where it went through a path
    (re.compile(r"(?<=:/)(/?)[^/\s'\"]+(?=@)"), r"\1…"),
    # name:password@host
    (re.compile(r"(?<![^\s'\"=/])[^/:=\s'\"]+:[^/\s'\"]+(?=@)"), "…"),
    # https://host/path?token=…
    (re.compile(r"(?i)([?&]\w*(?:token|key|password|secret|auth)\w*=)[^&\s'\"]+"), r"\1…"),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), "hf_…"),
)


def without_credentials(text: str) -> str:
    """A text in which passwords of addresses and tokens of the Hub are left out."""
    for pattern, shown in _CREDENTIALS:
        text = pattern.sub(shown, text)
    return text


class MMFreeError(Exception):
    """Base of the library's own errors: one clear line, shown without a traceback by the commands.

    Credentials that were typed into an argument are not repeated.
    """

    def __str__(self) -> str:
        return without_credentials(super().__str__())


class UnsupportedModelError(MMFreeError):
    """The checkpoint asks for an architecture or an option that the library does not implement."""


class CheckpointError(MMFreeError):
    """A checkpoint, a tokenizer or a configuration file is missing, damaged or inconsistent."""


class DownloadError(MMFreeError):
    """A repository or file cannot be fetched from the Hub."""


class UploadError(MMFreeError):
    """A folder cannot be uploaded to the Hub."""


class BackendError(MMFreeError):
    """A backend was forced but cannot run the operation; the message holds the reason."""


class TrainingError(MMFreeError):
    """Training cannot start, resume or go on."""


class TrainingStopped(KeyboardInterrupt):
    """A run was asked to end, by Ctrl-C or SIGTERM, and its state is saved.

    Attributes:
        status: Exit status of a command that ends for it, 128 and the signal's number.
    """

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.status = 128 + signal


class NumericalError(MMFreeError):
    """A model computes numbers that are not finite."""


class UsageError(MMFreeError):
    """A command was given arguments that do not fit together, or the environment a wrong value."""
