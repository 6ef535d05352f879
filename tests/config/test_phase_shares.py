"""Examples go to the phases that run, and runs of one phase leave each other theirs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.config.choices import Phase
from rlhf.config.freeze import write_frozen_config
from rlhf.config.schema.data import drop_shares_of_absent_phases
from rlhf.config.schema.run import RunConfig
from rlhf.data.splits import describe_division
from rlhf.jobs.completion import build_new_config, read_stopped_config
from rlhf.jobs.launch_command import Job
from rlhf.runtime.run_data import load_phase_data
from tests.plan.planned import Compose, changed, run_of

SFT, REWARD, PPO, DPO = Phase.sft, Phase.reward, Phase.ppo, Phase.dpo


def shares(config: RunConfig, *order: Phase) -> list[float]:
    return drop_shares_of_absent_phases(changed(config, phase={"order": list(order)})).data.split


def test_a_run_of_several_phases_divides_over_them(compose: Compose) -> None:
    config = run_of(compose, "data.split=[7,28,2]")
    assert shares(config, SFT, REWARD, PPO) == config.data.split
    assert shares(config, SFT, PPO) == [7, 0, 2]
    assert shares(config, SFT, DPO) == [7, 28, 0], "DPO uses the reward phase's share"
    for phase in (SFT, REWARD, PPO, DPO):
        assert shares(config, phase) == [7, 28, 2]
    assert shares(replace(config, from_run="runs/a"), SFT, PPO) == [7, 28, 2]


@pytest.mark.parametrize("seed", [1, 2])
def test_runs_of_one_phase_have_no_prompt_in_common(seed: int, compose: Compose) -> None:
    config = run_of(compose, "data.size=300", "data.split=[2,4,4]", f"seed={seed}")
    seen: list[set[str | None]] = []
    for phase in (SFT, REWARD, PPO):
        alone = drop_shares_of_absent_phases(changed(config, phase={"order": [phase]}))
        part = load_phase_data(alone, lambda _: None)[phase]
        seen.append({record.prompt for record in (*part.train, *part.eval)})
    assert [len(prompts) for prompts in seen] == [60, 120, 120]
    assert len(set.union(*seen)) == 300


def test_prompts_of_own_held_out_files_are_learned_by_no_phase_of_any_run(
    compose: Compose, tmp_path: Path
) -> None:
    """By prompt and not by row, over several sets, whatever phases a run or its from_run has."""
    paths = [tmp_path / f"{name}.jsonl" for name in ("one", "two", "held_one", "held_two")]
    for path, numbers in zip(paths, (range(40), range(60), range(30, 50), [1, 70]), strict=True):
        asked = [f"Q{n}{' ' * (n % 3)}" for n in numbers]
        answers = [{"chosen": f"{path.stem}{a}", "rejected": "no"} for a in "ab"]
        rows = [{"prompt": prompt, **answer} for prompt in asked for answer in answers]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    one, two, *held_out = paths
    config = run_of(compose, "data=local", f"data.path=[{one},{two}]")
    config = changed(config, data={"eval_path": [str(path) for path in held_out]})
    learned, held = set(), set()
    for order, from_run in (([SFT], None), ([REWARD], None), ([SFT, REWARD, PPO], "runs/a")):
        own = replace(changed(config, phase={"order": order}), from_run=from_run)
        parts = load_phase_data(drop_shares_of_absent_phases(own), lambda _: None)
        for phase in order:
            learned |= {str(record.prompt).strip() for record in parts[phase].train}
            held |= {str(record.prompt).strip() for record in parts[phase].eval}
    assert held == {f"Q{n}" for n in (*range(30, 50), 1, 70)}
    assert learned == {f"Q{n}" for n in range(60)} - held


def test_one_line_says_who_gets_what(compose: Compose) -> None:
    config = run_of(compose, "data.size=300", "data.split=[4,4,2]")
    parts = load_phase_data(config, lambda _: None)
    every = describe_division(parts, [SFT, REWARD, PPO])
    assert every == (
        "data: 300 examples: sft 120 (12 held out), reward 120 (12 held out), ppo 60 (6 held out)"
    )
    assert describe_division(parts, [DPO]) == (
        "data: 300 examples: dpo 120 (12 held out); set aside for sft, ppo: 180 "
        "(data.split=[0,1,0] uses all)"
    )
    assert describe_division(parts, [SFT, PPO]).endswith("; set aside for reward: 120")
    about = describe_division(parts, [SFT, PPO], scale=10)
    assert about.startswith("data: about 3,000 examples: sft 1,200 (120 held out), ppo 600 (60 ")
    said: list[str] = []
    load_phase_data(
        drop_shares_of_absent_phases(changed(config, phase={"order": [SFT, PPO]})), said.append
    )
    assert said[-1] == "data: 300 examples: sft 200 (20 held out), ppo 100 (10 held out)"


def test_a_new_run_freezes_its_division_and_resume_keeps_any(
    compose: Compose, tmp_path: Path
) -> None:
    words = ["phase=pipeline_rule", "model@reward_model=gold", "data.split=[7,28,2]"]
    new = build_new_config(Job(compose(words), words))
    assert new.data.split == [7, 0, 2]
    older = changed(new, data={"split": [7.0, 28.0, 2.0]})
    write_frozen_config(older, tmp_path)
    resumed, _ = read_stopped_config(Job(compose([]), [], resume=str(tmp_path)))
    assert resumed.data.split == [7, 28, 2]
