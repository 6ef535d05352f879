"""A plan as plan.json, as one line and as a table."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from rlhf.config.choices import Phase, Source
from rlhf.config.machine_rates import GIB
from rlhf.plan.plan import Plan, plan_run
from rlhf.plan.plan_tables import STATES, WORK, plan_as_json, plan_summary, render_plan
from rlhf.plan.steps import Load
from tests.plan.planned import Compose, changed, plan_of, run_of

pytestmark = pytest.mark.slow


def fitting(compose: Compose) -> Plan:
    return plan_of(compose, "model=opt_1.3b", "hardware=8xa100_80g", "zero=stage2")


def refused(compose: Compose) -> Plan:
    words = ("model=opt_13b", "hardware=a100_80g", "zero=stage2", "phase=pipeline_dpo")
    return plan_of(compose, *words)


def printed(plan: Plan) -> str:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(*render_plan(plan))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_keys_of_plan_json(compose: Compose) -> None:
    plan = fitting(compose)
    found = plan_as_json(plan)
    assert set(found) == set(
        "fits zero offloaded micro_batch rows hours price_usd ranks memory_gib_limit "
        "host_memory_gib_per_node disk_gb checkpoints_gb data phases".split()
    )
    assert found["fits"] is True
    assert (found["disk_gb"], found["checkpoints_gb"]) == pytest.approx((10.5, 63.2), abs=0.05)
    trained, frozen = ("sft", "actor", "critic", "reward_training"), ("reference", "reward")
    assert found["zero"] == dict.fromkeys(trained, 2) | dict.fromkeys(frozen, 0)
    assert found["micro_batch"] == {p.phase.value: p.micro_batch for p in plan.phases}
    assert (found["hours"], found["price_usd"]) == (plan.hours, plan.price)
    assert set(found["phases"]) == {"sft", "reward", "ppo"}
    for phase in plan.phases:
        told = found["phases"][phase.phase.value]
        of_phase = "hours steps step_seconds other_seconds memory_gib_per_rank moment memory tokens"
        assert set(told) == set(of_phase.split())
        assert told["hours"] == pytest.approx(phase.seconds / 3600)
        assert told["memory_gib_per_rank"] == phase.peak_bytes / GIB
    assert found["hours"] == pytest.approx(sum(p["hours"] for p in found["phases"].values()))


def test_lengths_are_told_and_what_is_a_toy(compose: Compose) -> None:
    asked = fitting(compose).asked
    read = {
        Phase.sft: Load(steps=9, lengths=(10, 30), records=400),
        Phase.reward: Load(steps=9, lengths=(50,), records=400),
        Phase.ppo: Load(steps=9, lengths=(7,), answer=12.5, records=400),
    }
    plan = plan_run(changed(asked, data={"source": Source.local, "path": "my.jsonl"}), read)
    found = plan_as_json(plan)
    assert found["data"] == {"examples": 400, "is_toy": False, "lengths_are_read": True}
    tokens = {name: phase["tokens"] for name, phase in found["phases"].items()}
    assert tokens == {
        "sft": {"sequence": {"mean": 20, "limit": 512}},
        "reward": {"sequence": {"mean": 50, "limit": 512}},
        "ppo": {"prompt": {"mean": 7, "limit": 256}, "response": {"mean": 12.5, "limit": 32}},
    }
    text = printed(plan)
    assert all(cell in text for cell in ("20 (max 512)", "7 (max 256)", "12 (max 32)"))
    assert "toy" not in text
    assert "assumed" not in text
    unread = plan_as_json(plan_run(asked))
    assert unread["data"] == {"examples": 129500, "is_toy": True, "lengths_are_read": False}
    assert unread["phases"]["ppo"]["tokens"]["response"] == {"mean": 32, "limit": 32}


def test_every_part_is_told(compose: Compose) -> None:
    """Also those of another moment and another setting: parts add up to the whole."""
    base = fitting(compose).asked
    sharded = changed(base, zero={"stage": 3}, ppo={"ema_beta": 0.99})
    long = {"max_prompt_tokens": 1024, "max_response_tokens": 1024}
    small = {"rollout_batch_size": 1024, "mini_batch_size": 8}
    generating = changed(sharded, rollout=long, ppo={**small, "micro_batch_size": 1})
    beside = changed(run_of(compose, "experiment=smoke"), rollout={"lag": 1, "overlap": True})
    seen = set[str]()
    for config in (base, sharded, generating, beside):
        for phase in plan_as_json(plan_run(config))["phases"].values():
            assert sum(phase["memory"].values()) == pytest.approx(phase["memory_gib_per_rank"])
            seen |= set(phase["memory"])
    assert seen == {*STATES, "ema", *WORK, "samplers"}


def test_a_refusal_has_a_reason_and_ways_out(compose: Compose) -> None:
    plan = refused(compose)
    found = plan_as_json(plan)
    assert found["fits"] is False
    assert found["reason"] == plan.misfit_reason
    assert found["what_fits"]
    assert {"reason", "what_fits"}.isdisjoint(plan_as_json(fitting(compose)))
    assert plan_summary(plan) == f"does not fit: {plan.misfit_reason}"
    text = " ".join(printed(plan).split())
    assert f"does not fit: {plan.misfit_reason}" in text
    assert "what fits: " in text


def test_offloaded_parts_are_named(compose: Compose) -> None:
    config = fitting(compose).asked
    plan = plan_run(changed(config, zero={"offload_optimizer": True}))
    found = plan_as_json(plan)
    assert found["offloaded"] == ["optimizer"]
    # In PPO a master and two moments of actor and critic, and their gradients in fp32.
    policy, scorer = 1315758080, 1315760128
    assert found["host_memory_gib_per_node"] * GIB == pytest.approx(16 * (policy + scorer), abs=999)


def test_one_line(compose: Compose) -> None:
    plan = fitting(compose)
    most = max(phase.peak_bytes for phase in plan.phases) / GIB
    assert plan.hours is not None
    assert plan.price is not None
    minutes = f"{60 * plan.hours:.1f} min"
    assert plan_summary(plan) == (
        f"ZeRO stage 2, {most:.1f} of 75.2 GiB on each of 8 ranks, {minutes}, ${plan.price:,.2f} "
        "for sft 690 steps of 32 examples, reward 2,757 steps of 32 pairs, ppo 56 steps of 128 "
        "responses of up to 32 tokens, from 129,500 generated toy examples (data=synthetic)"
    )
    cpu = plan_of(compose, "hardware.memory_gib=8")
    assert " of 7.8 GiB on one rank, " in plan_summary(cpu)
    assert "$" not in plan_summary(cpu)
    unknown = {"source": Source.hub, "size": 0, "path": "owner/name"}
    open_ended = plan_run(changed(plan.asked, data=unknown))
    found = plan_as_json(open_ended)
    assert found["hours"] is found["price_usd"] is found["phases"]["sft"]["hours"] is None
    assert found["phases"]["ppo"]["hours"] is not None  # 80 rounds are known
    assert plan_summary(open_ended).endswith(
        "ranks, unknown time for sft ? steps of 32 examples, reward ? steps of 32 pairs, ppo 56 "
        "steps of 128 responses of up to 32 tokens, from owner/name, whose number of examples is "
        "not known (data.size)"
    )


@pytest.mark.parametrize(
    ("hours", "words"), [(0.001, "3.6 s"), (0.5, "30.0 min"), (5, "5.0 h"), (72, "3.0 days")]
)
def test_times_have_a_unit_that_shows_them(hours: float, words: str, compose: Compose) -> None:
    plan = fitting(compose)
    nothing = {"step_seconds": {"train": 0.0}, "other_seconds": {}}
    first, *phases = (replace(phase, **nothing) for phase in plan.phases)
    first = replace(first, steps=1, step_seconds={"train": 3600 * hours})
    assert f"ranks, {words}, $" in plan_summary(replace(plan, phases=(first, *phases)))


def test_several_nodes_are_told_how_to_check_their_links(compose: Compose) -> None:
    words = ["model=opt_1.3b", "sft.batch_size=64", "reward.batch_size=64"]
    one, several = (
        render_plan(plan_of(compose, f"hardware={name}", *words))
        for name in ("8xa100_80g", "64xa100_80g")
    )
    assert any("-m rlhf.gpu_check.collectives" in str(note) for note in several)
    assert not any("collectives" in str(note) for note in one)


def test_the_table_fits_80_columns(compose: Compose) -> None:
    """Also with the longest words of all: offloads, days, refusals."""
    offloads = {f"offload_{name}": True for name in ("optimizer", "parameters", "ema")}
    config = changed(
        fitting(compose).asked,
        data={"size": 10**8},
        zero={"stage": 3, **offloads},
        ppo={"ema_beta": 0.99, "epochs": 1, "steps": None},
    )
    for plan in (fitting(compose), refused(compose), plan_run(config)):
        text = printed(plan)
        assert max(len(line) for line in text.splitlines()) <= 80
        rows = {line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")}
        wanted = {"weights", "activations", "GiB per rank", "when"}
        wanted |= {"GiB offloaded"} if any(phase.host for phase in plan.phases) else set()
        wanted |= {"micro-batch", "rows", "steps", "time"}
        wanted |= {"train, s per step"} | ({"generate, s per step"} if plan.fits else set())
        assert wanted <= rows
        assert "…" not in text


def test_the_rows_of_a_phase_add_up_to_its_time(compose: Compose) -> None:
    """PPO's held-out evaluations take longer than its steps here; a small plan is in MiB."""
    config = run_of(compose, "experiment=smoke")
    load = Load(steps=9, lengths=(10,), held_out=64)
    plan = plan_run(config, dict.fromkeys(config.phase.order, load))
    rows = {
        line.split("│")[1].strip(): line.split("│")[4]
        for line in printed(plan).splitlines()
        if line.count("│") == 5
    }
    per_step = [float(cell) for name, cell in rows.items() if name.endswith("s per step")]
    whole = float(rows["evaluate, s in all"]) + float(rows["build and save, s"])
    assert 9 * sum(per_step) + whole == pytest.approx(plan.phases[-1].seconds, abs=0.3)
    assert float(rows["evaluate, s in all"]) > 0
    assert float(rows["MiB per rank"]) == round(plan.phases[-1].peak_bytes / 2**20)
    told = plan_as_json(plan)["phases"]["ppo"]["other_seconds"]
    assert set(told) == {"evaluate", "prepare"}


def test_adapters_that_leave_out_a_phase_are_named(compose: Compose) -> None:
    for words, is_named in (("lora=default", True), ("lora=all", False), ("lora=none", False)):
        plan = plan_of(compose, words, "model=opt_1.3b", "hardware=a6000_48g", "zero=stage2")
        assert ("lora=all trains adapters instead" in " ".join(printed(plan).split())) == is_named


def test_the_table_ends_with_the_verdict(compose: Compose) -> None:
    text = " ".join(printed(fitting(compose)).split())
    setting, _, counts = plan_summary(fitting(compose)).partition(" for ")
    assert f"fits: {setting}; models on disk: 10.5 GB, checkpoints up to 63.2 GB" in text
    assert f"the time is for {counts} data=synthetic is a toy task" in text
    dpo = "model=opt_1.3b", "hardware=8xa100_80g", "zero=stage2", "phase=pipeline_dpo"
    toy = "rollout.max_response_tokens, sft.epochs, dpo.epochs as in your run"
    assert toy in " ".join(printed(plan_of(compose, *dpo)).split())
    assert text.endswith("every text is assumed to be as long as its limit")
