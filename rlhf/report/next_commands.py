"""Suggest commands for a run that has ended: to use its model, or to repeat it with a change."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf.base.program import launch_command, name_commands
from rlhf.base.stored_files import SAMPLES, find_entries
from rlhf.base.user_paths import relative_to_cwd
from rlhf.config.choices import Phase, Source
from rlhf.config.consent import keys_that_need_consent
from rlhf.config.effects import source_run_determines
from rlhf.config.freeze import read_command, read_frozen_keys
from rlhf.options.environments.keys import PROMPT_MARK
from rlhf.report.alarms import CHANCE
from rlhf.report.gain import read_gain
from rlhf.run.model_card import python_example
from rlhf.run.policies import TRAINED
from rlhf.run.results import read_phase_result
from rlhf.run.step_alarms import first_divergence, read_alarms

RUN_DIR_KEYS = ("run_dir", "resume")
TOO_FAR = ("kl_runaway", "duplicates", "entropy_collapse")  # alarms: more steps would not help
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
    lines = ["What to type next"]
    if folders:
        mark = PROMPT_MARK if game_option else ""
        prompts = [re.sub(mark, "", row["prompt"]) for row in SAMPLES.read_lines(run_dir)]
        model = str(relative_to_cwd(folders[0]))
        has_template = (folders[0] / "chat_template.jinja").exists()
        lines += [
            "  # use the model, in Python",
            *python_example(model, prompts, has_chat_template=has_template),
            f"  # {'let it play' if game_option else 'talk to it'}, and measure it",
            name_commands(f"python -m rlhf.chat {shlex.join([*run_arguments, *game_option])}"),
            name_commands(f"python -m rlhf.evaluate {shlex.join(run_arguments)}"),
        ]
    if find_entries(run_dir, "wandb/offline-run-*"):
        sync = f"wandb sync {shlex.quote(str(relative_to_cwd(run_dir)))}/wandb/offline-run-*"
        lines += ["  # upload the metrics", sync]
    # The overrides of the command that started the run, except overrides that name a directory.
    typed = [word for word in read_command(run_dir) if _override_key(word) not in RUN_DIR_KEYS]
    for change, overrides in _suggest_changes(run_dir):
        if keys.get("from_run") is None or not any(map(source_run_determines, overrides)):
            lines += [f"  # the same run, {change}", _launch_command(typed, overrides)]
            break
    reads_columns = any(re.fullmatch(r"rewards\..+\.columns", key) and keys[key] for key in keys)
    has_own_data = any(re.fullmatch(OWN_DATA, _override_key(word)) for word in typed)
    must_keep_data = has_own_data or reads_columns  # other data may lack the columns of rewards
    if source not in (Source.local, Source.environment) and not must_keep_data:
        lines += [
            "  # learn from your own examples",
            _launch_command(_drop_data_overrides(typed), {"data": "local", "data.path": "FILE"}),
        ]
    return [lines[0], *(f"  {line.strip()}" for line in lines[1:])] if lines[1:] else []


def _suggest_changes(run_dir: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield changes to try next, the best first, each as a description and an override.

    Corrections of a divergence or of a reward model that guesses come first, then more steps if PPO
    gained nothing, then a stronger KL penalty. Only the first is for runs without a trained actor.
    """
    keys = read_frozen_keys(run_dir)
    if (alarm := first_divergence(read_alarms(run_dir))) is not None:
        rate_key = "ppo.actor_lr" if alarm.phase == Phase.ppo else f"{alarm.phase}.lr"
        yield "with a tenth of the learning rate", {rate_key: f"{keys[rate_key] / 10:g}"}
    if not (run_dir / "ppo/actor").exists():
        return
    if (read_phase_result(run_dir, "reward") or {}).get("accuracy_ci", [1.0])[0] <= CHANCE:
        epochs = f"{2 * keys['reward.epochs']:g}"
        yield "with twice as many passes over the pairs", {"reward.epochs": epochs}
    result = read_phase_result(run_dir, "ppo") or {}
    gain = read_gain({"ppo": result})
    unmoved = ("no measurable change", "no change at any prompt")
    is_far = any(alarm.name in TOO_FAR for alarm in read_alarms(run_dir))
    has_stayed = gain is not None and gain.word in unmoved and gain.score is None and not is_far
    if has_stayed and "steps" in result:
        yield "for twice as many steps", {"ppo.steps": str(2 * result["steps"])}
    yield "held closer to the reference", {"ppo.kl_ctl": f"{2 * keys['ppo.kl_ctl'] or 0.1:g}"}


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
