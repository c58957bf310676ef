"""Models that make one vector of a text, and what their files say of how."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from .encoders import Pooling
from .stack import Decoder


@dataclass(frozen=True)
class EmbeddingUse:
    """How the publishers of a model embed texts, as sentence-transformers writes it down.

    Attributes:
        pooling: The vector of a text is its first or last token's, or the mean of all.
        prompts: What comes before a text, by the name of what the text is, such as "query".
        default_prompt: The name of the prompt of texts that name none; `None`: they have none.
        max_length: The most tokens of a text; `None`: as many as the model was made for.

    Example:
        >>> use = EmbeddingUse("mean", {"query": "Find what answers: "})
        >>> use.prompt("query"), use.prompt(None)
        ('Find what answers: ', '')
    """

    pooling: Pooling = "last"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None

    def prompt(self, name: str | None) -> str:
        """The text before a text.

        Args:
            name: What the text is; `None`: the default.

        Raises:
            ValueError: There is no prompt of this name.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise ValueError(
                f"[embed] 'prompt_name' must be one of the model's prompts ({known}) or be left out but "
                f"got {name!r:.80}."
            )
        return self.prompts[name]


class TextEmbedder(Decoder):
    """Makes one vector of a text: a causal model without a head, whose output is its last hidden state.

    Args:
        embed: The embedding, `(V, D)`.
        blocks: The blocks, first to last.
        norm: The norm after them.
        head: `None`.
        config: The architecture's configuration.
        positions: Adds positions to the embedded tokens; `None`: nothing does.

    Attributes:
        embedding: How its publishers embed texts.

    Shape:
        `tokens`: integers `(B, L)`, of which one outside the vocabulary makes its row NaN from there on;
        `valid`: booleans `(B, L)`, `False` where padded; the normed residual stream `(B, L, D)`.

    State:
        A tuple with the state of each block; every array has the batch on axis 0.

    Example:
        >>> blocks = [Block(32, GQA(32), SwiGLU(32, hidden_dims=64))]
        >>> model = TextEmbedder(nn.Embedding(100, 32), blocks, nn.RMSNorm(32))
        >>> model(mx.array([[1, 2, 3]]))[0].shape, model.embedding.pooling
        ((1, 3, 32), 'last')
    """

    pipeline = "feature-extraction"
    purpose = "embedding texts"
    command = "embed"
    embedding = EmbeddingUse()

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden


_WITHOUT_PREFIX = re.compile(r"(?:embed_tokens|layers|norm)(?:\.|$)")
_INNER_NORM = re.compile(r"(?<=_proj\.)norm(?=\.weight$)")


def embedder_names(name: str, names: Collection[str]) -> str:
    """Like `Architecture.newer_name`: models without a head may leave the prefix `model.` out.

    The norm inside a ternary linear, `X.norm`, is `X.rms_norm` where a configuration speaks of it.
    """
    name = f"model.{name}" if _WITHOUT_PREFIX.match(name) else name
    return _INNER_NORM.sub("rms_norm", name)


def embedding_use(model: Decoder) -> EmbeddingUse:
    """How a model embeds texts. One that was made to write them has the mean of all tokens."""
    return model.embedding if isinstance(model, TextEmbedder) else EmbeddingUse("mean")
