"""The parts of a check, in the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckModule:
    """A part: the name of its module in ``parts``, its title, time limit and description."""

    name: str
    title: str
    minutes: float
    about: str


PARTS = (
    CheckModule(
        name="machine",
        title="Machine",
        minutes=1,
        about="The card, its driver and the versions: what all other figures depend on.",
    ),
    CheckModule(
        name="decoders",
        title="Decoders beside the model",
        minutes=2,
        about="Tiny random models of every family with a fused decoder generate on the GPU, step "
        "by step and with CUDA graphs. The model's own forward pass over the responses must give "
        "the same log-probs, and draw the same tokens from the same random numbers. Distances are "
        "in standard deviations of the log-probs over the vocabulary: a wrong result is about 1 "
        "away. A token may differ if its random number is at the edge of its interval.",
    ),
    CheckModule(
        name="pipelines",
        title="Pipelines",
        minutes=7,
        about="SFT, reward model and PPO of a tiny model with the same seed everywhere. The last "
        "losses of SFT and reward model must be those of the CPU up to rounding, also half "
        "precision's; PPO's last score within four standard errors, since one rounded number can "
        "change a token and all that follows it.",
    ),
    CheckModule(
        name="memory",
        title="Memory beside the plan",
        minutes=4,
        about="The most memory that torch took of the GPU in a phase, beside the planner's figure "
        "for this phase without CUDA's own share.",
    ),
    CheckModule(
        name="speed",
        title="Speed",
        minutes=4,
        about="Response tokens per second of a rollout, and of transformers on the same weights "
        "and prompts; then whole PPO steps, as a run reports them. The second of two equal "
        "measurements counts.",
    ),
    CheckModule(
        name="oom",
        title="Out of memory on purpose",
        minutes=4,
        about="Torch may take only 60 % of what SFT was planned to need. The run must continue "
        "with smaller micro-batches, or end with the sentence that says what helps.",
    ),
    CheckModule(
        name="resume",
        title="Resume",
        minutes=6,
        about="A run is killed in a PPO step and resumed. It must equal the run that nobody "
        "killed. If even two whole runs differ on this GPU, the check says nothing.",
    ),
    CheckModule(
        name="hybrid_engine",
        title="Hybrid Engine",
        minutes=4,
        about="`rollout=hybrid_engine` compares DeepSpeed's kernels with the model's own layers "
        "before its first rollout. It may refuse to run here, with the reason.",
    ),
)
BY_NAME = {part.name: part for part in PARTS}
