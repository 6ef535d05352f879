"""The memory of a pass: gradients, and what is freed meanwhile."""

from __future__ import annotations

from collections import Counter

from rlhf.config.choices import Phase
from rlhf.plan.phase_costs import bytes_outside_steps
from tests.plan.planned import Compose, run_of
from tests.plan.test_phase_costs import eight_gpus, scene


def test_gradients_exist_until_their_step(compose: Compose) -> None:
    policy, scorer = 1315758080, 331196928
    head = 50272 * 2048
    for dtype, of_critic in (("bf16", 0), ("fp16", scorer // 8)):
        here = scene(eight_gpus(compose, f"hardware.dtype={dtype}"), Phase.ppo)
        actor, critic = here.models[:2]
        assert here.resident_bytes(critic)["gradients"] == 0
        assert (
            here.resident_bytes(actor)["gradients"] == 2 * of_critic
        )  # it waits for the actor's step
        few = {"sequences": 1, "tokens": 8, "positions": 4, "passes": 2}
        # The slope of the tied head, and of the embedding, on top of those of the step.
        expected = 2 * (of_critic + policy // 8 + 2 * head)
        assert here.training_peak(actor, **few)["gradients"] == expected
        assert here.training_peak(critic, **few)["gradients"] == 2 * (scorer // 8)


def test_a_first_pass_frees_activations_for_its_gradients(compose: Compose) -> None:
    config = run_of(compose, "model=opt_1.3b", "hardware=a100_40g", "zero=stage1")
    here = scene(config, Phase.sft)
    (model,) = here.models
    head, weights = 50272 * 2048, 1315758080

    def peak(passes: int, sequences: int) -> Counter[str]:
        shapes = {"sequences": sequences, "tokens": 256, "positions": 256}
        return here.training_peak(model, **shapes, passes=passes) - here.resident_bytes()

    stored = 256 * 24 * 12 * 2048 * 2
    slopes = 256 * (2 * 8192 + 2048) * 2  # more than those of the output layer
    assert peak(1, 32) == Counter(gradients=2 * head, activations=32 * (stored + slopes))
    assert peak(2, 32) == Counter(
        gradients=2 * (weights + head), activations=32 * (stored + slopes)
    )
    # Few activations are gone when the last gradients come.
    assert peak(1, 1) == Counter(gradients=2 * (weights + head))


def test_deepspeed_tries_its_optimizer_while_it_is_built(compose: Compose) -> None:
    words = ("phase=sft", "model=opt_1.3b", "hardware=a100_40g", "zero=stage1")
    weights = 1315758080
    for dtype, built, later in (("bf16", 2 + 10, 2 + 10), ("fp16", 2 + 4 + 4, 2 + 12)):
        here = scene(run_of(compose, *words, f"hardware.dtype={dtype}"), Phase.sft)
        found = bytes_outside_steps(here)
        sizes = {name: parts.total() - parts["process"] for name, parts in found.items()}
        assert sizes == {"building": built * weights, "between steps": later * weights}
