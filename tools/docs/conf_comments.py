"""Copy the schema's explanations into conf/base: ``python -m tools.docs.conf_comments``."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import get_type_hints

from rlhf.config.schema.run import RunConfig
from rlhf.jobs.launch_command import field_docstrings

WIDTH = 100
KEY = re.compile(r"^( *)(\w+):(.*?)(?:\s+#.*)?$")


def explained(text: str, group: type) -> str:
    """Return the YAML ``text`` of a config group with the schema's explanation above every key.

    Other comments stay at the top of the file only; an empty line ends them.
    """
    header, _, body = text.partition("\n\n")
    lines: list[str] = []
    schema, nested = group, group
    for line in body.splitlines():
        match = KEY.match(line)
        if match is None:  # an old comment, or an empty line
            continue
        indent, key, value = match.groups()
        schema = nested if indent else group
        kind = get_type_hints(schema)[key]
        if not value.strip():
            nested = kind
        wrapped = textwrap.wrap(field_docstrings(schema).get(key, ""), WIDTH - len(indent) - 2)
        lines += [f"{indent}# {part}" for part in wrapped]
        lines.append(f"{indent}{key}:{value}")
    return header + "\n\n" + "\n".join(lines) + "\n"


def renew(conf: Path) -> dict[Path, str]:
    """Return the text that each file of ``conf/base`` should have."""
    groups = get_type_hints(RunConfig)
    files = [path for path in sorted((conf / "base").glob("*.yaml")) if path.stem in groups]
    return {path: explained(path.read_text(encoding="utf-8"), groups[path.stem]) for path in files}


if __name__ == "__main__":
    for path, text in renew(Path("conf")).items():
        path.write_text(text, encoding="utf-8")
