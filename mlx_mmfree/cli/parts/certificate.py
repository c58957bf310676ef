"""The certificate that goes with a model card."""

import sys
from pathlib import Path

from ...errors import BackendError, UnsupportedModelError


def certificate_section(folder: Path) -> str:
    """The certificate of the model in a folder, in Markdown, from its headers alone.

    Nothing for a model that does not decode texts.
    """
    from ...evaluation.audit import certify
    from ...evaluation.audit.section import section
    from ...hub.adapters.adapter import attach
    from ...hub.checkpoint.load import open_model

    try:
        opened = open_model(folder)
        return section(certify(attach(opened.without_values(), opened.adapter())))
    except UnsupportedModelError:
        return ""
    except BackendError as error:
        print(f"note: the model card gets no certificate: {error}", file=sys.stderr)
        return ""
