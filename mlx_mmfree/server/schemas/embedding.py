"""The body of `/v1/embeddings`."""

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from .checking import Body
from .completion import Prompts, prompts
from .sampling import User


class EmbeddingRequest(Body):
    """A request for the embeddings of texts."""

    input: Annotated[Prompts, PlainValidator(prompts)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1)] = None
    user: User = ""
