"""How many steps a phase takes."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.choices import Phase, Source
from rlhf.config.schema.run import RunConfig
from rlhf.plan.steps import (
    count_examples,
    count_steps,
    describe_examples,
    total_examples,
)
from tests.plan.planned import Compose, changed, run_of


def run(compose: Compose, **groups: dict[str, Any]) -> RunConfig:
    """1000 examples split 4:4:2, a twentieth of each part held out."""
    data = {"size": 1000, "split": [4, 4, 2], "eval_share": 0.05} | groups.pop("data", {})
    return changed(run_of(compose), data=data, **groups)


def test_examples_of_each_phase(compose: Compose) -> None:
    data = run(compose, data={"split": [5, 3, 2]}).data
    found = [count_examples(data, phase) for phase in (Phase.sft, Phase.reward, Phase.ppo)]
    assert found == [475, 285, 190]
    assert count_examples(data, Phase.dpo) == 285  # the reward phase's part


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"source": Source.synthetic}, "1,000 generated toy examples (data=synthetic)"),
        ({"source": Source.local, "path": ["a", "b.csv"]}, "1,000 examples of a, b.csv"),
        ({"source": Source.hub, "sets": {"shp": None}}, "1,000 examples of shp"),
        (
            {"source": Source.local, "path": "a", "size": 0},
            "a, whose number of examples is not known (data.size)",
        ),
    ],
)
def test_examples_in_words(data: dict[str, Any], words: str, compose: Compose) -> None:
    assert describe_examples(run(compose, data=data).data) == words


def test_the_sizes_of_named_sets_are_known_before_they_are_read(compose: Compose) -> None:
    named = run_of(compose, "data=deepspeed_chat").data
    assert total_examples(named) == 76256 + 112052 + 33143 + 76256
    halved = run_of(compose, "data=rm_static", "data.sets.rm_static.weight=0.5").data
    assert total_examples(halved) == 38128
    assert total_examples(run_of(compose, "data=zhihu_kol").data) is None


def test_held_out_sets_of_their_own_take_nothing(compose: Compose) -> None:
    own = run(compose, data={"eval_path": "held_out.jsonl"}).data
    assert count_examples(own, Phase.sft) == 400
    hub = run(compose, data={"source": Source.hub}).data
    assert count_examples(hub, Phase.sft) == 400


@pytest.mark.parametrize(("epochs", "steps"), [(1, 38), (2.5, 95), (0.001, 1)])
def test_steps_are_epochs_over_batches(epochs: float, steps: int, compose: Compose) -> None:
    config = run(compose, sft={"batch_size": 10, "epochs": epochs})
    assert count_steps(config, Phase.sft) == steps


def test_rounds_of_ppo_have_fewer_prompts_than_responses(compose: Compose) -> None:
    # 190 prompts, 4 of them answered twice in every round; test_optimizers.py has both caps.
    batch = {"rollout_batch_size": 8, "responses_per_prompt": 2}
    for steps, epochs, found in ((80, 1, 48), (20, 1, 20), (None, 2, 95)):
        config = run(compose, ppo={"steps": steps, "epochs": epochs, **batch})
        assert count_steps(config, Phase.ppo) == found


def test_lines_of_a_local_file_are_counted(compose: Compose, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("{}\n" * 200)
    config = run(compose, data={"size": 0, "path": str(path), "source": Source.local})
    assert count_examples(config.data, Phase.sft) == 76
    counted = run(compose, data={"size": 400, "path": str(path), "source": Source.local})
    assert count_examples(counted.data, Phase.sft) == 152  # what the configuration says goes first


@pytest.mark.parametrize(
    "path", [None, "not_there.jsonl", "some/hub_id", "table.parquet", ["a.jsonl", "b.jsonl"]]
)
def test_what_cannot_be_counted_has_no_steps(
    path: Any, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.parquet").write_text("\n\n")
    config = run(compose, data={"size": 0, "path": path, "source": Source.local})
    assert count_examples(config.data, Phase.sft) is None
    assert count_steps(config, Phase.sft) is None
    assert count_steps(changed(config, ppo={"steps": None, "epochs": 1}), Phase.ppo) is None
    assert count_steps(changed(config, ppo={"steps": 7, "epochs": 1}), Phase.ppo) == 7
