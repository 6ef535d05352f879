"""Write model folders that appear complete or not at all, and the sections of their model card.

Weights may arrive one at a time: only one file of weights is held.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rlhf.base.atomic import replace_atomically, retry_transient_errors
from rlhf.base.heartbeat import beat
from rlhf.base.safe_text import redact
from rlhf.checkpoint.results import finished_phases, read_phase_result
from rlhf.config.choices import Source
from rlhf.config.freeze import FROZEN, frozen_keys, read_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARD_BYTES = 5 * 10**9  # largest file of weights: rank 0 keeps it in memory while it saves
PLACES = ("run_dir", "resume")  # keys that do not describe the model
TIMES = ("seconds", "planned", "measured")
LIMITS = """\
- It was trained for research. Nobody has tested it for harmful, false, biased or private output:
  it is not safe to deploy.
- It learned from the data above only, besides the model that it started from. The data may have
  rights of others, and its faults become the model's.
- The results are of held-out examples of the same data. A reward model's score compares answers to
  one prompt; a policy can raise it without better answers."""
SYNTHETIC = """
- The data is a generated task about short lists of words. The model can do nothing else."""
LONGEST = 100  # characters of a question on one line
QUESTION = re.compile(r"\bHuman:\s*((?:(?!Human:).)+?)\s*Assistant:\s*\Z", re.DOTALL)


def origin_sections(run_dir: Path, *, rows: Mapping[str, tuple[int, int]]) -> str:
    """Return the sections on command, settings, data and limits; "" if the run has no config.

    ``rows`` has the numbers of training and held-out examples of each phase, if they are known.
    """
    if not (run_dir / FROZEN).is_file():
        return ""
    keys = frozen_keys(run_dir)
    words = read_command(run_dir)
    command = shlex.join(["python", "launch.py", *words])
    sections = {
        "Command": f"```bash\n{command}\n```" if words else "",
        "Settings that differ from the presets": markdown_table(
            ("key", "value"), _settings_of_command(words, keys)
        ),
        "Data": markdown_table(("what", "value"), _data_rows(keys, rows)),
        "Limits": LIMITS + (SYNTHETIC if keys["data.source"] == Source.synthetic else ""),
    }
    text = "".join(f"\n\n## {title}\n\n{body}" for title, body in sections.items() if body)
    return redact(text, os.environ)


def results_section(run_dir: Path) -> str:
    """Return the section with the final metrics of each finished phase."""
    rows = [
        (f"{phase}: {name.replace('_', ' ')}", _format_value(value))
        for phase in finished_phases(run_dir)
        for name, value in (read_phase_result(run_dir, phase) or {}).items()
        if name not in TIMES
    ]
    return f"\n\n## Results\n\n{markdown_table(('measure', 'value'), rows)}" if rows else ""


def markdown_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; an empty text if there are no rows."""
    lines = ["| " + " | ".join(map(_escape_cell, row)) + " |" for row in rows]
    head = [_escape_cell(title) for title in titles]
    return "\n".join(
        [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *lines] if lines else ""
    )


def _settings_of_command(
    words: Iterable[str], keys: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield each key that the words of a command set, and the value that the run used."""
    for word in words:
        key, sign, typed = word.lstrip("+~").partition("=")
        if sign and not word.startswith("-") and key not in PLACES:
            yield key, _format_value(keys.get(key, typed))


def _data_rows(
    keys: Mapping[str, Any], rows: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, str]]:
    yield "source", _format_value(keys["data.source"])
    sets = [
        f"{value}"
        for key, value in keys.items()
        if key.startswith("data.sets.") and key.endswith(".path")
    ]
    place = keys["data.path"] or sets or f"{keys['data.size']} generated examples"
    yield "from", _format_value(place)
    yield "proportions of SFT, reward and PPO", _format_value(keys["data.split"])
    yield (
        "held out",
        "files of their own" if keys["data.eval_path"] else _format_value(keys["data.eval_share"]),
    )
    for phase, (train, held_out) in rows.items():
        yield f"{phase}: examples", f"{train} to train on, {held_out} held out"


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {_format_value(each)}" for name, each in value.items()
        )
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _escape_cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def python_example(folder: str, prompts: Iterable[str], *, has_chat_template: bool) -> list[str]:
    """Return lines of Python that load the model and print its answer to the shortest prompt.

    With a chat template the question is a message; without, it is the prompt itself.
    """
    if has_chat_template:
        found = [match[1] for prompt in prompts if (match := QUESTION.search(prompt))]
        question = _quote_shortest_text(found, "Your question")
        argument, answer = f'[{{"role": "user", "content": {question}}}]', '[-1]["content"]'
    else:
        argument, answer = _quote_shortest_text(prompts, "Your prompt"), ""
    return [
        "from transformers import pipeline",
        f'model = pipeline("text-generation", {json.dumps(folder)})',
        f'print(model({argument})[0]["generated_text"]{answer})',
    ]


def _quote_shortest_text(texts: Iterable[str], otherwise: str) -> str:
    short = min((text for text in texts if len(text) <= LONGEST), key=len, default=otherwise)
    return json.dumps(short, ensure_ascii=False)


@contextmanager
def replace_folder_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which replaces ``folder`` if the block succeeds."""
    with replace_atomically(folder) as building:
        building.mkdir(parents=True)
        yield building
        apply_umask(building)


def apply_umask(folder: Path) -> None:
    """Give the weights in ``folder`` its own permissions; safetensors lets only the owner read."""
    for file in folder.rglob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)


def save_model(
    folder: Path,
    write: Callable[[Path], None],
    tokenizer: PreTrainedTokenizerBase,
    *,
    description: str,
) -> None:
    """Write a Hugging Face folder: the files of ``write``, the tokenizer and a model card."""
    from huggingface_hub import ModelCard, ModelCardData

    header = ModelCardData(library_name="transformers", tags=["rlhf"]).to_yaml()
    title = f"{folder.parent.name}/{folder.name}"
    card = ModelCard(f"---\n{header}\n---\n\n# {title}\n\n{description}\n")
    with replace_folder_atomically(folder) as building:
        write(building)
        tokenizer.save_pretrained(building)
        card.save(building / "README.md")


def tensors_to_save(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters (tied ones once) and persistent buffers by name, sharded as they are."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {**dict(module.named_parameters()), **buffers}


def save_streamed(
    folder: Path,
    model: PreTrainedModel,
    stream: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int,
) -> None:
    """Write config and weights of ``model`` as transformers does; read weights from ``stream``."""
    from transformers.core_model_loading import WeightConverter

    conversions = getattr(model, "_weight_conversions", None) or []
    if any(isinstance(conversion, WeightConverter) for conversion in conversions):
        # A tensor of the file combines several tensors of the model (experts): all are needed.
        state = {name: tensor.to("cpu", copy=True) for name, tensor in stream}
        model.save_pretrained(folder, state_dict=state, max_shard_size=shard_bytes)
        return
    model.save_pretrained(folder, state_dict={})
    (folder / "model.safetensors").unlink(missing_ok=True)
    write_shards(folder, _rename_as_saved(model, stream), shard_bytes)


def _rename_as_saved(
    model: PreTrainedModel, stream: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``stream`` with the names that transformers gives them in files."""
    from transformers.core_model_loading import revert_weight_conversion

    left_out = set(model._keys_to_ignore_on_save or ())
    for name, tensor in stream:
        if name not in left_out:
            yield from revert_weight_conversion(model, {name: tensor}).items()


def write_shards(folder: Path, stream: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write files of at most ``shard_bytes`` (or of a single larger tensor), and their index."""
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    sizes = {"total_size": 0, "total_parameters": 0}

    def write() -> None:
        file = folder / f"{len(shards)}.part"
        retry_transient_errors(lambda: save_file(held, file, metadata={"format": "pt"}))
        shards.append(list(held))
        held.clear()

    for name, tensor in stream:
        beat()
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard_bytes:
            write()
        held[name] = tensor.to("cpu", copy=True).contiguous()
        sizes["total_size"] += tensor.nbytes
        sizes["total_parameters"] += tensor.numel()
    write()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for number, file in enumerate(files):
        (folder / f"{number}.part").rename(folder / file)
    places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": sizes, "weight_map": dict(sorted(places.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text)
