"""The models of a chat: policies and reward model of a run, or a model without a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlhf.base.errors import CheckpointError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.user_paths import expand_user_path
from rlhf.chat.talker import SampledAnswer, Talker, move_to_best_device
from rlhf.config.choices import Dtype
from rlhf.config.freeze import FROZEN, OF_MODELS, read_frozen_keys, refuse_code_of_run
from rlhf.models.build import build_scorer, complete_reward_model
from rlhf.models.pretrained import load_config
from rlhf.models.sources import RUN_FOLDER, ModelSource, build_load_error
from rlhf.models.tokenizers import check_same_tokens, load_tokenizer
from rlhf.rollout.sampling import SamplingSettings
from rlhf.run.finished_phase import verify_model
from rlhf.run.policies import TRAINED, folders_by_policy_name

if TYPE_CHECKING:
    from transformers import GenerationConfig

KEY = "MODEL_FOLDER"
MAX_TOKENS = 256


class ModelWithoutRun:
    """A model that belongs to no run, with its own tokenizer, template and sampling settings."""

    plain_prompt_notice = (
        "The tokenizer has no chat template: each line is plain text by itself, which the model "
        "continues."
    )

    def __init__(self, folder: Path) -> None:
        """Read the model's settings.

        Raises:
            CheckpointError: if the model is a scorer, which cannot answer.
        """
        _refuse_scorer(folder, key=KEY)
        self.folder = folder
        self._own = _read_generation_config(folder)

    @cached_property
    def talker(self) -> Talker:
        """Return the model, which is loaded when it is first used."""
        source = ModelSource(key=KEY, path=str(self.folder))
        return Talker(source, load_tokenizer(self.folder, key=KEY), Dtype.auto)

    @property
    def sampling_settings(self) -> SamplingSettings:
        """Return the settings in generation_config.json; without settings, decoding is greedy."""
        own, positions = self._own, self.talker.context_length
        return SamplingSettings(
            max_tokens=MAX_TOKENS if positions is None else min(MAX_TOKENS, positions // 2),
            temperature=(own.temperature or 1.0) if own.do_sample else 0.0,
            top_k=own.top_k or 0,
            top_p=own.top_p or 1.0,
            min_p=own.min_p or 0.0,
        )


def find_model_without_run(place: Path) -> ModelWithoutRun | None:
    """Return the model in folder ``place`` or with hub id ``place``; None if ``place`` is a run.

    Raises:
        CheckpointError: if ``place`` is neither a run nor a model on this machine.
    """
    folder = expand_user_path(place, key="RUN_DIR")
    if (folder / FROZEN).exists():
        return None
    if not folder.is_dir():
        return ModelWithoutRun(_find_cached_snapshot(place))
    if _holds_model(folder):
        return ModelWithoutRun(folder)
    raise CheckpointError(
        f"{folder} is not the directory of a run: it has no {FROZEN}; and it holds no model: it "
        "has no config.json"
    )


def _find_cached_snapshot(place: Path) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(place), local_files_only=True))
    except (OSError, ValueError) as error:  # it is not in the cache, or not a valid hub id
        raise CheckpointError(
            f"{place} is no folder, and no model of that name is in the hub's cache on this "
            "machine: give the directory of a run or the folder of a model"
        ) from error


def _read_generation_config(folder: Path) -> GenerationConfig:
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return GenerationConfig()
    with translate_errors(partial(build_load_error, folder, key=KEY, what="a model")):
        return GenerationConfig.from_pretrained(folder)


NAMES = folders_by_policy_name()  # folders that may hold a policy, by name


class RunModels:
    """The models of a run, each loaded when it is first used.

    ``choice`` is a name in ``NAMES``, the folder of a model, or None for the newest policy.
    """

    plain_prompt_notice = (
        "Trained on prompts that are no conversations: each line is a prompt by itself."
    )

    def __init__(self, run_dir: Path, choice: str | None, *, trusts_code: bool = False) -> None:
        """Find the folder of the chosen policy.

        Raises:
            CheckpointError: if there is no run in ``run_dir``, or no such policy.
            ConfigError: if its models have code to run, and the command does not trust the code.
        """
        refuse_code_of_run(run_dir, trusts_code=trusts_code, keys=OF_MODELS)
        # Not load_run: it refuses runs of other versions of rlhf, but their models can answer too.
        self._keys = read_frozen_keys(run_dir)
        self.run_dir = run_dir
        self.folder = self._find_policy_folder(choice)
        self._load_talker = cache(self._build_talker)
        # If the run used bf16 or fp16, take auto: this machine may support only the other one.
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

    @property
    def talker(self) -> Talker:
        """Return the chosen policy, which is loaded when it is first used."""
        return self._load_talker(self.folder)

    def iterate_compared_models(self) -> Iterator[tuple[str, Talker]]:
        """Yield the SFT model, then the chosen policy (the newest policy if SFT is chosen)."""
        sft = self.run_dir / "sft/model"
        later = self._find_policy_folder(None) if self.folder == sft else self.folder
        if later == sft or not sft.is_dir():
            raise CheckpointError(
                f"/compare needs sft/model and a policy that started from it; {self.run_dir} has "
                f"{self._policy_names()}"
            )
        for folder in (sft, later):
            yield f"{folder.parent.name}/{folder.name}", self._load_talker(folder)

    def score(self, talker: Talker, prompt_ids: list[int], answer: SampledAnswer) -> float | None:
        """Return the reward model's score of an answer; None if the run has no reward model.

        Raises:
            ConfigError: if the policy and the reward model have different tokenizers.
        """
        if self._reward_model is None:
            return None
        folder = self.run_dir / "reward/model"
        check_same_tokens(talker.tokenizer, load_tokenizer(folder, key=RUN_FOLDER), place=folder)
        with torch.no_grad():
            device = next(self._reward_model.parameters()).device
            ids_1S = torch.tensor([prompt_ids + answer.ids], device=device)
            return float(self._reward_model(ids_1S)[0, -1])

    @cached_property
    def _reward_model(self) -> nn.Module | None:
        folder = self.run_dir / "reward/model"
        if not folder.is_dir():
            return None
        source = self._verified_model_source(folder, "reward_model")
        scorer = build_scorer(source, load_tokenizer(folder, key=RUN_FOLDER), seed=0)
        model = complete_reward_model(scorer, source, self._keys)
        return move_to_best_device(model, self._dtype)

    def _build_talker(self, folder: Path) -> Talker:
        source = self._verified_model_source(folder, "model")
        stop = self._keys.get("rollout.stop") or ()
        return Talker(source, load_tokenizer(folder, key=source.key), self._dtype, stop=stop)

    def _verified_model_source(self, folder: Path, group: str) -> ModelSource:
        """Verify the model in ``folder`` and return its source; trust only the run's own code."""
        verify_model(folder)
        is_own = folder.is_relative_to(self.run_dir)
        return ModelSource(
            key=RUN_FOLDER if is_own else "--model",
            path=str(folder),
            attention=self._keys.get(f"{group}.attention"),
            trust_remote_code=is_own and bool(self._keys.get(f"{group}.trust_remote_code")),
        )

    def _find_policy_folder(self, choice: str | None) -> Path:
        """Return the folder of the policy ``choice``, or of the newest policy if it is None."""
        if choice is not None and choice not in NAMES:
            folder = expand_user_path(choice, key="--model")
            if not _holds_model(folder):
                raise CheckpointError(
                    f"--model={folder}: must be {', '.join(NAMES)} or a Hugging Face folder with "
                    "config.json"
                )
            _refuse_scorer(folder, key="--model")
            return folder
        newest = [policy.folder for policy in reversed(TRAINED)]
        places = newest if choice is None else NAMES[choice]
        for place in places:
            if (self.run_dir / place).is_dir():
                return self.run_dir / place
        raise CheckpointError(
            f"{self.run_dir} has no {' or '.join(places)} to chat with, only "
            f"{self._policy_names()}; wait until the phase has finished, continue the run "
            f"with python launch.py resume={self.run_dir}, or choose a model with --model"
        )

    def _policy_names(self) -> str:
        places = [place for each in NAMES.values() for place in each]
        return ", ".join(p for p in places if (self.run_dir / p).is_dir()) or "no policy"


def _holds_model(folder: Path) -> bool:
    """Return True if ``folder`` holds a model or an adapter in the format of Hugging Face."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _refuse_scorer(folder: Path, *, key: str) -> None:
    if (folder / "config.json").is_file():
        names = load_config(ModelSource(key=key, path=str(folder))).architectures
        if "SequenceClassification" in str(names):
            raise CheckpointError(
                f"{key}={folder}: {names[0]} gives scores, not answers; choose a language model"
            )
