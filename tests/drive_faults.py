"""Run launch.py on a drive that refuses one file of the run directory.

    python tests/drive_faults.py ERRNO NAME RUN_DIR OVERRIDE...     NAME "-": refuse nothing
    python tests/drive_faults.py 0 FILE RUN_DIR OVERRIDE...         write the names of all files

NAME is a file's path in the run directory, see ``name_of``. Rust code writes weights and
tokenizers: its errors are plain exceptions with the number in their text.
"""

import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# The paths that an audited operation writes to, by their place among its arguments.
OPERATIONS = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "os.truncate": 0}


def name_of(path: Path, run_dir: Path) -> str | None:
    """Return the name under which a path of the run is refused: unfinished ones, and steps alike.

    ``sft/.model.building/a.json`` -> ``sft/model/a.json``; ``step-00000007`` -> ``step-N``.
    """
    if not path.is_relative_to(run_dir):
        return None
    names = (re.sub(r"^\.(.+)\.(building|old)$", r"\1", p) for p in path.relative_to(run_dir).parts)
    name = re.sub(r"step-\d+", "step-N", "/".join(names))
    return re.sub(r"\d+\.part$", "model.safetensors", name) or None


def refuse(number: int, refused: str, run_dir: Path) -> dict[str, None]:
    """Refuse the file ``refused`` from now on; return the names of all files, as they come."""
    seen: dict[str, None] = {}

    def check(path: Any, *, in_rust: bool = False) -> None:
        name = name_of(Path(os.path.abspath(os.fsdecode(path))), run_dir)
        if name is not None:
            seen.setdefault(name)
        if name != refused or not number:
            return
        if in_rust:
            raise Exception(f"{os.strerror(number)} (os error {number})")
        raise OSError(number, os.strerror(number), os.fsdecode(path))

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not isinstance(arguments[0], int) and arguments[0] is not None:
            if arguments[2] & WRITING:
                check(arguments[0])
        elif event in OPERATIONS:
            check(arguments[OPERATIONS[event]])

    def before(write: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
        def writing(*arguments: Any, **options: Any) -> Any:
            check(place(*arguments, **options), in_rust=True)
            return write(*arguments, **options)

        return writing

    import safetensors.torch
    from transformers import PreTrainedTokenizerFast as Fast

    def tokenizer_in(_: object, save_directory: str, *__: object, **___: object) -> Path:
        return Path(save_directory, "tokenizer.json")

    weights: Any = safetensors.torch
    weights.serialize_file = before(weights.serialize_file, lambda _, filename, **__: filename)
    Fast._save_pretrained = before(Fast._save_pretrained, tokenizer_in)
    sys.addaudithook(audited)
    return seen


def main() -> None:
    """Run launch.py with the fault that the command names."""
    number, name, run_dir, *overrides = sys.argv[1:]
    seen = refuse(int(number), name, Path(run_dir))
    sys.argv = [str(ROOT / "launch.py"), *overrides, f"run_dir={run_dir}"]
    sys.path[0] = str(ROOT)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        if int(number) == 0 and name != "-":
            files = [each for each in seen if not (Path(run_dir) / each).is_dir()]
            Path(name).write_text("\n".join(files))


if __name__ == "__main__":
    main()
