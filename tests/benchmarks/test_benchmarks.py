"""The benchmarks run, at the smallest shape, and what they compute from their measurements."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.runs import TINY_RUN, python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"processor", "cores", "threads", "memory_gb", "gpu", "versions", "date", "commit"}
PARTS = {"generate", "score", "train", "iteration", "peak_gb"}


def run(script: str, *arguments: str, figures: Path, **how: Any) -> dict[str, Any]:
    """Figures of a benchmark that ran as its user starts it; ``python`` says how."""
    common = ("--shape", "micro", "--rounds", "1", "--json", str(figures))
    done = python(BENCHMARKS / script, *common, *arguments, **how)
    assert done.returncode == 0, done.stderr
    assert "| --- |" in done.stdout
    assert str(figures) in done.stdout
    found: dict[str, Any] = json.loads(figures.read_text())
    assert found["machine"].keys() >= MACHINE
    assert found["machine"]["versions"].keys() == {"torch", "transformers", "deepspeed", "rlhf"}
    assert found["benchmark"] == script.removesuffix(".py")
    return found


def positive(row: dict[str, Any], *names: str) -> bool:
    """Return True if these figures of a row were measured."""
    return all(row[name] > 0 for name in names)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "words", "rows", "measured"),
    [
        # 100 ms would start 64 processes
        ("episodes.py", ["--repeats", "1", "--ms", "0", "10"], 3, ["tokens_per_second"]),
        ("overlap.py", ["--repeats", "2"], 3, ["generate", "score", "train", "step"]),
        (
            "scaling.py",
            "--repeats 1 --tokens 4 --points 2 --rollout hf --sweeps response padding".split(),
            *(4, ["tokens_per_second", *PARTS]),
        ),
        (
            "scaling.py",
            "--repeats 1 --tokens 4 --sweeps tokens --prompts 64".split(),
            *(3, ["tokens_per_second", *PARTS]),
        ),
        (
            "loading.py",
            ["--sharded_shape", "micro_llama", "--sharded_dtypes", "bf16"],
            *(3, ["seconds", "peak_gb"]),
        ),
        ("shared_trunk.py", ["--repeats", "1", "--rollout", "hf"], 3, [*PARTS]),
    ],
    ids=["episodes", "overlap", "scaling", "cost of tokens", "loading", "shared trunk"],
)
def test_a_benchmark_measures_each_row(
    script: str, words: list[str], rows: int, measured: list[str], tmp_path: Path
) -> None:
    found = run(script, *words, figures=tmp_path / "figures.json")
    assert len(found["rows"]) == rows
    assert all(positive(row, *measured) for row in found["rows"])
    if script == "loading.py":
        assert all(positive(row, "loading_seconds") for row in found["sharded"])
        sharded = [row for row in found["sharded"] if row["way"].endswith("stage3")]
        assert [row["saving_peak_1"] > 0 for row in sharded] == [True, True]
        assert all(seconds > 0 for seconds in found["rows_per_second"].values())


@pytest.mark.soak
def test_rollout(tmp_path: Path) -> None:
    ways = ["generate fp32, dynamic cache", "rollout=hf bf16", "rollout=fast bf16"]
    arguments = ["--repeats", "3", "--tokens", "128", "--ways", *ways]  # a step must show
    found = run("rollout.py", *arguments, figures=tmp_path / "rollout.json")
    assert [row["way"] for row in found["rows"]] == ways
    for row in found["rows"]:
        assert row["tokens_per_second"] == pytest.approx(16 * 128 / row["seconds"])
        assert 0 < row["step_ms"] < 1e3 * row["seconds"]
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["step_ms"])
    assert found["rows"][0]["times_generate_fp32"] == 1.0
    assert found["rates"][0]["bandwidth_gb_per_s"] > 0


@pytest.mark.slow
def test_instruction_sets_and_ways_that_do_not_run_stand_beside_the_others(tmp_path: Path) -> None:
    ways = ["rollout=fast fp32", "rollout=hybrid_engine bf16"]
    arguments = ["--repeats", "1", "--tokens", "4", "--ways", *ways, "--isa", "none"]
    found = run("rollout.py", *arguments, figures=tmp_path / "rollout.json")
    figures = {row["way"]: row for row in found["rows"]}
    assert {"rollout=fast fp32", "rollout=fast fp32, none"} < set(figures)
    assert "hybrid_engine with hardware.device=cpu" in found["rows"][-1]["error"]


@pytest.mark.soak
def test_long_run(tmp_path: Path) -> None:
    words = [*TINY_RUN, "checkpoint.every_steps=1"]
    figures = tmp_path / "long_run.json"
    found = run("long_run.py", "--overrides", *words, figures=figures)
    assert len(found["memory_mib"]) == 2
    assert found["calls"]["gradient norms, which find NaN and clip"] > 4
    assert found["calls"]["checkpoints"] >= 2
    assert 0 < found["seconds"]["checkpoints"] < found["run_seconds"]


@pytest.mark.slow
def test_ppo_step(tmp_path: Path) -> None:
    arguments = ["--repeats", "1", "--tokens", "8", "--dtype", "fp32", "--rollout", "hf"]
    arguments += ["--isa", "none"]
    found = run("ppo_step.py", *arguments, figures=tmp_path / "ppo_step.json")
    row, without_kernels = found["rows"]
    assert without_kernels["way"] == f"{row['way']}, none"
    assert row.keys() >= PARTS | {"flop", "tflop_per_s", "floor_seconds", "share_of_floor"}
    assert row["iteration"] == pytest.approx(row["generate"] + row["score"] + row["train"])
    assert row["samples"]["tokens"] == [16 * 8]
    assert found["generate_fp32_seconds"] > 0


COUNT_SIBLINGS = """
import json, os, pathlib
parent = os.getppid()
children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
print(json.dumps({"busy": len(children) - 1}))
"""


def test_a_way_is_measured_beside_busy_processes(load: Any, tmp_path: Path) -> None:
    common = load("common")
    script = tmp_path / "count_siblings.py"
    script.write_text(COUNT_SIBLINGS)
    ways = {"alone": common.Way(script=script, task={})}
    found = common.take_turns(ways | common.busy_ways(ways, [1, 2]), rounds=1)
    busy = {name: samples["busy"][0] for name, samples in found.items()}
    assert busy == {"alone": busy["alone"]} | {
        f"alone, beside {count}": busy["alone"] + count for count in (1, 2)
    }


def small_work(load: Any) -> tuple[ModuleType, ModuleType, Any, Any]:
    """Return the modules shapes and floors, a small decoder, and work for it."""
    shapes = load("shapes")
    decoder = shapes.Decoder(vocab=10, hidden=2, layers=1, heads=1, ffn=4)
    work = shapes.Work(sequences=2, prompt_tokens=3, response_tokens=2)
    return shapes, load("floors"), decoder, work


def test_the_slowest_rank_is_counted_by_hand(load: Any) -> None:
    lengths = load("lengths")
    # Micro-batches (8, 6) and (4, 1) pad to 24 tokens, (5, 5) and (2, 2) to 14; the mean is 33 / 2.
    assert lengths.slowest([[1, 8, 6, 4], [5, 2, 5, 2]], 2) == 24 / 16.5
    drawn = lengths.draw_lengths(20_000, 8192, 1.0, seed=1)
    assert max(drawn) == 8192
    assert sum(drawn) / 20_000 == pytest.approx(2048, rel=0.1)


def test_flops_by_hand(load: Any) -> None:
    shapes, floors, decoder, work = small_work(load)
    # 32 weights for 10 tokens, attention over two sequences of 5, a head of 20 weights at 4 places.
    assert floors.forward_flops(decoder, work, logits=True) == 640 + 200 + 160
    assert floors.forward_flops(decoder, work, logits=False, responses=False) == 384 + 72
    shape = shapes.Shape(policy=decoder, scorer=decoder)
    for reuses, score in ((False, 2 * 1000 + 2 * 840), (True, 1000 + 2 * 840)):
        parts = floors.iteration_flops(shape, work, reuses_logprobs=reuses)
        assert parts == {"generate": 1000, "score": score, "train": 3 * 1840}


def test_bytes_of_a_step_by_hand(load: Any) -> None:
    _, floors, decoder, work = small_work(load)
    # 32 + 20 weights; keys and values, 2 wide each, of 2 sequences at 3 + 1 tokens.
    assert floors.step_bytes(decoder, work, "fp32") == 4 * (52 + 32)
    assert floors.step_bytes(decoder, work, "bf16") == 2 * (52 + 32)


@pytest.mark.parametrize("name", ["micro", "micro_llama"])
def test_weights_are_those_of_the_model(load: Any, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    shapes = load("shapes")
    shape = shapes.SHAPES[name]
    shapes.make_models(tmp_path, shape)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    named = model.named_parameters()
    weights = [p.numel() for name, p in named if p.dim() == 2 and "embed" not in name]
    head = model.get_output_embeddings().weight.numel()
    is_tied = model.config.tie_word_embeddings
    assert sum(weights) + (head if is_tied else 0) == shape.policy.matrices + shape.policy.head


def test_generation_floor(load: Any) -> None:
    _, floors, decoder, work = small_work(load)
    measured = {"read_buffer": [50.0, 168.0], "read_packed": [100.0], "one_matrix": [300.0]}
    measured |= {"gemm_fp32": [114.0, 228.0], "gemm_bf16": [1.0]}
    rates = floors.Rates.of(measured)
    assert (rates.bandwidth, rates.cached) == (168.0, 300.0)
    # 456 operations of the prompts at 228 a second, then one step of 336 bytes at 168 a second.
    assert rates.generation_floor(decoder, work, "fp32") == 2.0 + 2.0


def test_published_times_are_those_of_this_kind_of_cpu(load: Any) -> None:
    module = load("ppo_step")
    amx, other = (module.published(kind, "tiny") for kind in ("amx", "avx512_bf16"))
    assert amx[2]["way"] == "DeepSpeed-Chat bf16, published"
    assert amx[2]["iteration"] == 1.34, "as measured: what one kind takes says little of another"
    assert other[0]["iteration"] == 1.47
    assert module.published("avx2", "tiny") == module.published("amx", "micro") == []
    there = "6.1 s where the peers were measured (amx)."
    assert module.likeness("amx", "opt125m", 5.0).endswith(f"took 5 s; {there}")
    assert "no peers of this kind (avx2)" in module.likeness("avx2", "opt125m", 5.0)


def test_published_times_are_those_of_the_page(load: Any) -> None:
    module: ModuleType = load("ppo_step")
    page = (BENCHMARKS / "speed.md").read_text()
    _, with_amx, without = re.split("### With(?:out)? AMX: the peers", page)
    for kind, text in ((module.AMX, with_amx), (module.AVX512_BF16, without)):
        lines = [line.split(" | ") for line in text.splitlines()]
        for shape, column in (("tiny", 1), ("opt125m", 3)):
            for peer in kind.peers[shape]:
                (cells,) = (line for line in lines if line[0] == f"| {peer.name}")
                numbers = re.findall(r"[0-9.]+", f"{cells[column]} {cells[column + 1]}")
                assert [float(number) for number in numbers] == list(peer[1:])
        for shape, seconds in kind.generate_seconds.items():
            assert f"{shape}: {seconds} s" in text
