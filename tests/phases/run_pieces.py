"""PPO and DPO in this process: models on disk, plain engines, and a note of all that was told."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rlhf.base.ranks import Ranks
from rlhf.config.choices import Dtype, Phase
from rlhf.config.freeze import to_run_config
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData
from rlhf.engine.settings import EngineSettings
from rlhf.models.tokenizers import load_tokenizer
from rlhf.phases import dpo
from rlhf.phases.ppo import evaluation, rlhf_engine
from rlhf.phases.shared import exporting
from rlhf.phases.shared.context import RunContext
from rlhf.run.console import Console
from rlhf.run.jsonl import LOGS
from rlhf.run.metric_table import describe_undocumented_metric
from rlhf.run.tracker import Sample, Tracker
from tests.conftest import Compose
from tests.models_on_disk import save_models
from tests.plain_engine import TrainingEngine

WORDS = ["kiwi", "plum", "fig", "pear and apple", "a long answer with many more words in it"]


def pairs_of(prompt: str, *responses: str) -> list[Record]:
    """All pairs of responses, the best of which stands first."""
    return [
        Record(prompt=f"\n\nHuman: {prompt}\n\nAssistant:", chosen=f" {a}", rejected=f" {b}")
        for place, a in enumerate(responses)
        for b in responses[place + 1 :]
    ]


TRAIN = [
    *pairs_of("one", *WORDS[:4]),
    *pairs_of("two", *WORDS[2:]),
    *pairs_of("three, with a longer question", *WORDS[1:4]),
]  # 6 + 3 + 3 pairs
EVAL = [*pairs_of("five", *WORDS[2:]), *pairs_of("six", *WORDS[:2])]


class PlannedEngine(TrainingEngine):
    """Takes what build_engine takes."""

    def __init__(self, module: nn.Module, *, plan: Any, optimizer: Any = None, **_: Any) -> None:
        lr = 0.0 if optimizer is None else 0.05
        super().__init__(module, accumulation=plan.accumulation, lr=lr)
        self.follower = SimpleNamespace(swap_in=nullcontext)

    def close(self) -> None: ...


@dataclass
class Notes(Tracker):
    """What a run has told."""

    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    sample: list[tuple[str, int, Sample]] = field(default_factory=list)
    rows: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    numbers: list[tuple[int, Mapping[str, Sequence[float]]]] = field(default_factory=list)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        for name in values:
            assert describe_undocumented_metric(name) is None
        self.logged.append((step, dict(values)))

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:
        self.sample += [(phase, step, sample) for sample in samples]

    def append(self, log: str, phase: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        assert log in LOGS
        self.rows += [(step, line) for line in lines]

    def histograms(self, phase: str, step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        self.numbers.append((step, numbers))

    def steps_with(self, name: str) -> list[int]:
        return [step for step, values in self.logged if name in values]


Make = Callable[..., tuple[RunContext, "Notes"]]


class Judge:
    """Knows that all responses are equally good."""

    def rate(self, prompt: str, response: str, *, ended: bool) -> dict[str, float]:
        return {"gold": 0.25, "exact": 0.0, "correct": 0.5}


def run_context(
    compose: Compose, run_dir: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> tuple[RunContext, Notes]:
    """The context of one rank over a tiny policy and a tiny reward model."""
    text = " ".join(part for record in TRAIN for part in record if part)
    save_models(run_dir, policy=text, reward=text)
    for module in (dpo, rlhf_engine):
        monkeypatch.setattr(module, "build_engine", PlannedEngine)
    notes = Notes()

    def save(_: RunContext, export: Any, folder: Path, **card: object) -> None:
        notes.saved[str(folder.relative_to(run_dir))] = export

    for module in (exporting, evaluation):
        monkeypatch.setattr(module, "save_export", save)
    paths = ["model=pretrained", "model@reward_model=pretrained", "data.template=plain"]
    paths += [f"model.path={run_dir / 'policy'}", f"reward_model.path={run_dir / 'reward'}"]
    config = to_run_config(compose([*paths, *overrides]))
    config.data.cache_dir = str(run_dir / "cache")
    part = PhaseData(TRAIN, EVAL)
    context = RunContext(
        config=config,
        run_dir=run_dir,
        ranks=Ranks(),
        settings=EngineSettings(zero=config.zero, dtype=Dtype.fp32),
        tokenizer=load_tokenizer(run_dir / "policy", key="k"),
        parts={phase: part for phase in (Phase.sft, Phase.reward, Phase.ppo)},
        judge=None,
        console=Console(quiet=True),
        tracker=notes,
    )
    return context, notes
