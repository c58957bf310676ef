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
    """Leaves out the passwords of addresses and tokens of the Hub.

    Args:
        text: What may hold them.

    Returns:
        The text with a sign instead of each.

    Example:
        >>> without_credentials("https://me:secret@host/model")
        'https://…@host/model'
    """
    for pattern, shown in _CREDENTIALS:
        text = pattern.sub(shown, text)
    return text


# C0 except newline and tab, DEL, C1, and the characters that change the direction of text
_CONTROLS = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)
_HARMLESS = dict.fromkeys(_CONTROLS, "\N{REPLACEMENT CHARACTER}")


def shown(text: str) -> str:
    """The text with U+FFFD in place of every control character.

    Each character is replaced on its own, so that a control sequence in two parts is harmless too.

    Args:
        text: Any text.

    Returns:
        The text, in which newlines and tabs stay.

    Example:
        >>> shown("a\\x1b[2Jb")
        'a�[2Jb'
    """
    return text.translate(_HARMLESS)


_shown: dict[str, str] = {}


def show_as(folder: str, source: str) -> None:
    """Lets messages name a file of the user instead of a folder that was made of it.

    Args:
        folder: The folder.
        source: The file.

    Example:
        >>> show_as("/scratch/1", "model.gguf")
        >>> str(MMFreeError("'/scratch/1/tokenizer.json' is damaged"))
        "'model.gguf' is damaged"
    """
    _shown[folder] = source


def shown_path(text: str) -> str:
    """The user's files in a text, in the place of folders that were made of them.

    Args:
        text: A path, or a text with paths.

    Returns:
        The text with the user's files.

    Example:
        >>> show_as("/scratch/2", "other.gguf")
        >>> shown_path("/scratch/2")
        'other.gguf'
    """
    for folder, source in _shown.items():
        parts = re.split(rf"{re.escape(folder)}(?!\w)(?:/[^'\"\s]*)?", text)
        text = source.join(parts)
    return text


def install_extra(extra: str) -> str:
    """Tells how the packages of an extra are installed, for an error message.

    Args:
        extra: Its name in `pyproject.toml`.

    Returns:
        A sentence with a command that works in a clone of the project.

    Example:
        >>> install_extra("vision")
        "Run this in your clone of mlx_mmfree: pip install '.[vision]'"
    """
    return f"Run this in your clone of mlx_mmfree: pip install '.[{extra}]'"


class MMFreeError(Exception):
    """The base of the library's own errors. The commands show its one line without a traceback.

    The line does not repeat credentials that were typed into an argument, and names the user's files.
    What it quotes of the user or of a file cannot steer a terminal.
    """

    def __str__(self) -> str:
        return shown(without_credentials(shown_path(super().__str__())))


class UnsupportedModelError(MMFreeError):
    """The checkpoint asks for an architecture or an option that the library does not implement."""


class CheckpointError(MMFreeError):
    """A checkpoint, a tokenizer or a configuration file is missing, damaged or inconsistent."""


class DownloadError(MMFreeError):
    """A repository or file cannot be fetched from the Hub."""


class UploadError(MMFreeError):
    """A folder cannot be uploaded to the Hub."""


class BackendError(MMFreeError):
    """A backend was forced but cannot run the operation. The message holds the reason."""


class TrainingError(MMFreeError):
    """Training cannot start, resume or go on."""


class TrainingStopped(KeyboardInterrupt):
    """A run was asked to end, by Ctrl-C or SIGTERM, and its state is saved.

    Attributes:
        status: The exit status of the command: 128 plus the number of the signal.
    """

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.status = 128 + signal


class NumericalError(MMFreeError):
    """A model computes numbers that are not finite."""


class MeasurementError(MMFreeError):
    """A process that measures for the benchmark has failed."""


class UsageError(MMFreeError):
    """The arguments of a command do not fit together, or a variable of the environment is wrong."""


class EffortError(UsageError):
    """A chat template refuses an effort of thinking."""


class ImageError(MMFreeError):
    """A picture is missing, damaged, too large, or in a format that is not read."""
