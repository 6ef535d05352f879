"""Build HTML and SVG as text; attributes and plain text are escaped."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """Return an element; ``class_`` stands for class, and ``_`` in other names for ``-``.

    An attribute that is None is left out, and one that is True has no value.
    """
    words = [name]
    for key, value in attributes.items():
        attribute = "class" if key == "class_" else key.replace("_", "-")
        if value is True:
            words.append(attribute)
        elif value is not None:
            words.append(f'{attribute}="{escape(_text(value))}"')
    inner = "".join(c if isinstance(c, Markup) else escape(c, quote=False) for c in content)
    return Markup(f"<{' '.join(words)}>{inner}</{name}>")


def joined(*parts: str) -> Markup:
    """Return parts one after the other; plain text among them is escaped."""
    return Markup("".join(p if isinstance(p, Markup) else escape(p, quote=False) for p in parts))


def _text(value: object) -> str:
    """Return an attribute's value; coordinates need one digit after the point."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
