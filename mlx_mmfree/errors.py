"""The exceptions that the library raises for mistakes a user can mend."""


class MMFreeError(Exception):
    """Base of the library's own errors: one clear line, shown without a traceback by the commands."""


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


class UsageError(MMFreeError):
    """A command was given arguments that do not fit together."""
