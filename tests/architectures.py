"""Sizes of small models, as config.json has them."""

from typing import Any


def sizes(kind: str, width: int, wide: int, *, layers: int = 2, heads: int = 2, **more: Any) -> Any:
    """Return the fields of a model; a family of other names has them in ``more``."""
    fields = {"model_type": kind, "hidden_size": width, "num_hidden_layers": layers}
    fields |= {"num_attention_heads": heads}
    if kind == "opt":
        return fields | {"ffn_dim": wide, "word_embed_proj_dim": width} | more
    return fields | {"intermediate_size": wide} | more
