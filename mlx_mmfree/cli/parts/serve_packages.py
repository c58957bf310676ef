"""What the server needs beside the package itself."""

import importlib.util

from ...errors import UsageError, install_extra

_PACKAGES = (
    "httptools",
    "llguidance",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
    "uvloop",
)


def check_serve_packages(command: str) -> None:
    """Checks that the extra `serve` is installed.

    Args:
        command: The command that needs it, as in messages.

    Raises:
        UsageError: A package is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"[{command}] the packages of the extra 'serve' must be installed but {', '.join(missing)} "
            f"cannot be found. {install_extra('serve')}"
        )
