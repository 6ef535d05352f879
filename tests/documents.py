"""Read what a command prints with --json, and compare it with the command's schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"


def read_document(command: str, text: str) -> dict[str, Any]:
    """Return the only JSON document in ``text``, which has the schema of ``command``."""
    found: dict[str, Any] = json.loads(text)
    is_error = found.keys() == {"error"}
    schema = SCHEMAS / f"{'error' if is_error else command}.json"
    jsonschema.validate(found, json.loads(schema.read_text()))
    return found
