"""Find the policy of a run to chat with, and the settings with which it samples."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from rlhf.base.errors import CheckpointError
from rlhf.base.user_paths import expand_user_path
from rlhf.chat.talker import Talker
from rlhf.config.choices import Dtype
from rlhf.config.consent import require_consent
from rlhf.config.freeze import read_frozen_keys
from rlhf.models.pretrained import load_config
from rlhf.models.sources import RUN_FOLDER, ModelSource
from rlhf.models.tokenizers import load_tokenizer
from rlhf.rollout.sampling import SamplingSettings
from rlhf.run.finished_phase import verify_model
from rlhf.run.policies import TRAINED, folders_by_policy_name

FOLDERS_BY_NAME = folders_by_policy_name()  # name of a policy -> folders that may hold it


class RunPolicy:
    """A policy of a run, which is loaded when it is first used.

    ``choice`` is a key of ``FOLDERS_BY_NAME``, the folder of a model, or None: the newest policy.
    """

    def __init__(self, run_dir: Path, choice: str | None, *, trusts_run: bool = False) -> None:
        """Find the folder of the policy.

        Raises:
            CheckpointError: if there is no run in ``run_dir``, or no such policy.
            ConfigError: if its models need consent (rlhf/config/consent.py), and it is not given.
        """
        require_consent(run_dir, is_given=trusts_run, models_only=True)
        # Not load_run: it refuses runs of newer versions, or of absent packages.
        self._keys = read_frozen_keys(run_dir)
        self.run_dir = run_dir
        self.folder = self._find_policy_folder(choice)
        # For a bf16 or fp16 run, use auto: this machine may support only the other of these dtypes.
        is_fp32 = self._keys["hardware.dtype"] == Dtype.fp32
        self._dtype = Dtype.fp32 if is_fp32 else Dtype.auto

    @property
    def sampling_settings(self) -> SamplingSettings:
        """Return the settings of the run's rollouts."""
        return SamplingSettings(
            max_tokens=self._keys["rollout.max_response_tokens"],
            temperature=self._keys["rollout.temperature"],
            top_k=self._keys["rollout.top_k"],
            top_p=self._keys["rollout.top_p"],
            min_p=self._keys.get("rollout.min_p") or 0.0,
            min_tokens=self._keys.get("rollout.min_response_tokens") or 0,
        )

    @cached_property
    def talker(self) -> Talker:
        """Return the verified and loaded policy."""
        verify_model(self.folder)
        is_of_run = self.folder.is_relative_to(self.run_dir)  # only then is its code trusted
        source = ModelSource(
            key=RUN_FOLDER if is_of_run else "--model",
            path=str(self.folder),
            attention=self._keys.get("model.attention"),
            trust_remote_code=is_of_run and bool(self._keys.get("model.trust_remote_code")),
        )
        stop = self._keys.get("rollout.stop") or ()
        return Talker(source, load_tokenizer(self.folder, key=source.key), self._dtype, stop=stop)

    def _find_policy_folder(self, choice: str | None) -> Path:
        """Return the folder of the policy ``choice``, or of the newest policy if it is None."""
        if choice is not None and choice not in FOLDERS_BY_NAME:
            folder = expand_user_path(choice, key="--model")
            _check_language_model(folder)
            return folder
        newest = [policy.folder for policy in reversed(TRAINED)]
        names = newest if choice is None else FOLDERS_BY_NAME[choice]
        for name in names:
            if (self.run_dir / name).is_dir():
                return self.run_dir / name
        known = (name for names in FOLDERS_BY_NAME.values() for name in names)
        found = ", ".join(name for name in known if (self.run_dir / name).is_dir())
        raise CheckpointError(
            f"{self.run_dir} has no {' or '.join(names)} to chat with; it has "
            f"{found or 'no policy'}. Wait until the phase has finished, continue the run "
            f"with python launch.py resume={self.run_dir}, or choose a model with --model"
        )


def _check_language_model(folder: Path) -> None:
    has_config = (folder / "config.json").is_file()
    if not has_config and not (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"--model={folder}: must be {', '.join(FOLDERS_BY_NAME)} or a Hugging Face folder with "
            "config.json"
        )
    if has_config:
        names = load_config(ModelSource(key="--model", path=str(folder))).architectures
        if "SequenceClassification" in str(names):
            raise CheckpointError(
                f"--model={folder}: {names[0]} gives scores, not answers; choose a language model"
            )
