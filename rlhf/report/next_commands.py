"""Suggest commands for a run that has ended: to use its model, or to repeat it with a change."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.base.program import launch_command, name_commands
from rlhf.base.stored_files import SAMPLES, find_entries
from rlhf.base.user_paths import relative_to_cwd
from rlhf.config.choices import Source
from rlhf.config.consent import keys_that_need_consent
from rlhf.config.effects import source_run_determines
from rlhf.config.freeze import read_command, read_frozen_keys
from rlhf.options.environments.keys import PROMPT_MARK
from rlhf.report.alarms import (
    PENALTY_KEYS,
    RATE_KEYS,
    REMEDIES,
    Doubt,
    read_doubts,
)
from rlhf.run.model_card import python_example
from rlhf.run.policies import TRAINED
from rlhf.run.results import read_phase_result
from rlhf.run.wandb_run import INSTALL_VIEWS, VIEWS_COMMAND

RUN_DIR_KEYS = ("run_dir", "resume")
OWN_DATA = r"data\.(path|sets(\.[^.]+(\.path)?)?)"  # keys that name a file or a data set of the hub
KEYS_OF_ANY_DATA = (  # keys that make sense with any data
    *("data.split", "data.eval_share", "data.template", "data.clean", "data.deduplicate"),
    *("data.bucket_by_length", "data.cache_dir"),
)


def suggest_commands(run_dir: Path) -> list[str]:
    """Return lines with commands that use or measure the model, or repeat the run with changes."""
    folders = [run_dir / policy.folder for policy in reversed(TRAINED)]
    folders = [folder for folder in folders if folder.exists()]
    keys = read_frozen_keys(run_dir)
    source = keys.get("data.source")
    game_option = ["--environment"] * (source == Source.environment)
    trust_option = ["--trust-run"] * bool(keys_that_need_consent(run_dir))
    run_arguments = [str(relative_to_cwd(run_dir)), *trust_option]
    lines = []
    if folders:
        mark = PROMPT_MARK if game_option else ""
        prompts = [re.sub(mark, "", row["prompt"]) for row in SAMPLES.read_lines(run_dir)]
        model = str(relative_to_cwd(folders[0]))
        has_template = (folders[0] / "chat_template.jinja").exists()
        lines += [
            "# use the model, in Python",
            *python_example(model, prompts, has_chat_template=has_template).splitlines(),
            f"# {'let it play' if game_option else 'talk to it'}, and measure it",
            name_commands(f"python -m rlhf.chat {shlex.join([*run_arguments, *game_option])}"),
            name_commands(f"python -m rlhf.evaluate {shlex.join(run_arguments)}"),
        ]
    if find_entries(run_dir, "wandb/offline-run-*"):
        sync = f"wandb sync {shlex.quote(str(relative_to_cwd(run_dir)))}/wandb/offline-run-*"
        views = name_commands(f"{VIEWS_COMMAND} ENTITY/PROJECT")
        lines += ["# upload the metrics, and save views of them", sync, INSTALL_VIEWS + views]
    # The overrides of the command that started the run, except overrides that name a directory.
    typed = [word for word in read_command(run_dir) if _override_key(word) not in RUN_DIR_KEYS]
    doubts = read_doubts(run_dir)
    for change, overrides in _suggest_changes(run_dir, doubts):
        if keys.get("from_run") is None or not any(map(source_run_determines, overrides)):
            repeat = [f"# the same run, {change}", _launch_command(typed, overrides)]
            lines = [*repeat, *lines] if doubts else [*lines, *repeat]
            break
    reads_columns = any(re.fullmatch(r"rewards\..+\.columns", key) and keys[key] for key in keys)
    has_own_data = any(re.fullmatch(OWN_DATA, _override_key(word)) for word in typed)
    must_keep_data = has_own_data or reads_columns  # other data may lack the columns of rewards
    if source not in (Source.local, Source.environment) and not must_keep_data:
        lines += [
            "# learn from your own examples",
            _launch_command(_drop_data_overrides(typed), {"data": "local", "data.path": "FILE"}),
        ]
    return ["What to type next", *(f"  {line.strip()}" for line in lines)] if lines else []


def _suggest_changes(
    run_dir: Path, doubts: Sequence[Doubt]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield changes to try next, the best first, each as a description and an override.

    The remedies of ``doubts`` come in their order, then, if there is an actor, a stronger KL
    penalty.
    """
    keys = read_frozen_keys(run_dir)
    has_actor = (run_dir / "ppo/actor").exists()
    if has_actor:  # the key may be null, for as many steps as the prompts give
        keys |= {"ppo.steps": (read_phase_result(run_dir, "ppo") or {}).get("steps")}
    for doubt in [*doubts, *([Doubt("", "ppo", "closer")] if has_actor else [])]:
        yield from _apply_remedy(doubt, keys)


def _apply_remedy(doubt: Doubt, keys: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the change that remedies ``doubt`` in a run with the values ``keys``, if any."""
    if doubt.remedy is None:
        return
    remedy = REMEDIES[doubt.remedy]
    key = remedy["key"].format(
        phase=doubt.phase,
        penalty_key=PENALTY_KEYS.get(doubt.phase),
        rate_key=RATE_KEYS.get(doubt.phase, f"{doubt.phase}.lr"),
    )
    if (value := keys.get(key)) is not None:
        changed = remedy["factor"] * value or remedy.get("instead_of_0", value)
        yield remedy["change"], {key: f"{changed:.10g}"}


def _drop_data_overrides(words: Iterable[str]) -> list[str]:
    """Drop from_run and overrides that choose the data; keep those in ``KEYS_OF_ANY_DATA``."""
    data_key = re.compile(r"from_run|data(\..*)?")
    keys = {word: _override_key(word) for word in words}
    return [w for w, k in keys.items() if k in KEYS_OF_ANY_DATA or not data_key.fullmatch(k)]


def _override_key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _launch_command(words: Iterable[str], changes: dict[str, str]) -> str:
    """Return a launch command with the overrides ``changes``, and ``words`` for other keys."""
    kept = [word for word in words if _override_key(word) not in changes]
    return launch_command([*kept, *(f"{k}={v}" for k, v in changes.items())])
