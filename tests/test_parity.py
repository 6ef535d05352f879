"""parity.yaml: no flag of other programs is left out, its keys compose, its tests exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import DictConfig, OmegaConf

import rlhf
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_errors import schema_types, suggested_keys

Compose = Callable[[list[str]], DictConfig]

ROOT = Path(__file__).parents[1]


class ParityRow(NamedTuple):
    """One row of a table; ``tests`` are paths below tests/ with the names of test functions."""

    name: str
    what: str
    here: str
    tests: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        """Everything in backticks, which can be typed on the command line."""
        return re.findall(r"`([^`]+)`", self.here)


class Section(NamedTuple):
    """A table with its title, a text, and the heads of its columns."""

    title: str
    text: str
    heads: list[str]
    rows: list[ParityRow]


def read_sections(path: Path) -> list[Section]:
    """Tables in ``path``, with one row per line of ``rows``."""
    sections: object = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(sections, list)
    return [
        Section(s["title"], s["text"], s["heads"], [read_row(x) for x in s["rows"].splitlines()])
        for s in sections
    ]


def read_row(line: str) -> ParityRow:
    """A row of four cells with something in each."""
    name, what, here, tests = (cell.strip() for cell in line.split(" | "))
    return ParityRow(name, what, here, tuple(tests.split(", ")))


SOURCE = Path(__file__).with_name("parity.yaml")
SECTIONS = {section.title: section for section in read_sections(SOURCE)}
ROWS = [row for section in SECTIONS.values() for row in section.rows]
KEYS = sorted({key for row in ROWS for key in row.keys})
TESTS = sorted({test for row in ROWS for test in row.tests})

# The flags as each program declares them, kept apart from the rows on purpose.
LEARNING = """
    data_path data_split data_output_path model_name_or_path per_device_train_batch_size
    per_device_eval_batch_size max_seq_len learning_rate weight_decay num_train_epochs
    gradient_accumulation_steps lr_scheduler_type num_warmup_steps output_dir seed local_rank
    gradient_checkpointing dropout offload dtype zero_stage lora_dim lora_module_name
    only_optimize_lora lora_learning_rate compute_fp32_loss enable_tensorboard tensorboard_path
    add_eot_token
"""
PPO = """
    data_path data_split data_output_path unsupervised_dataset_name
    unsupervised_dataset_config_name unsup_coef actor_model_name_or_path critic_model_name_or_path
    num_padding_at_beginning per_device_generation_batch_size per_device_training_batch_size
    generation_batches ppo_epochs max_prompt_seq_len max_answer_seq_len actor_learning_rate
    critic_learning_rate actor_weight_decay critic_weight_decay num_train_epochs lr_scheduler_type
    gradient_accumulation_steps num_warmup_steps output_dir seed preprocessing_num_workers
    local_rank enable_hybrid_engine unpin_actor_parameters release_inference_cache
    inference_tp_size tp_gather_partition_size offload dtype offload_reference_model
    offload_reward_model actor_zero_stage critic_zero_stage actor_gradient_checkpointing
    critic_gradient_checkpointing actor_dropout critic_dropout actor_lora_dim critic_lora_dim
    actor_lora_module_name critic_lora_module_name only_optimize_lora actor_lora_learning_rate
    critic_lora_learning_rate enable_ema enable_mixed_precision_lora compute_fp32_loss
    enable_tensorboard tensorboard_path add_eot_token align_overflow print_answers
    print_answers_interval enable_test_mode test_stop_step
"""
FLAGS = {
    "DeepSpeed-Chat, every step": "deepspeed deepspeed_config",
    "DeepSpeed-Chat, step 1: supervised fine-tuning": LEARNING
    + "sft_only_data_path eot_token print_loss",
    "DeepSpeed-Chat, step 2: reward model": LEARNING
    + "num_padding_at_beginning eval_interval eval_iters",
    "DeepSpeed-Chat, step 2: DPO": LEARNING
    + "beta label_smoothing offload_reference_model print_loss",
    "DeepSpeed-Chat, step 3: PPO": PPO,
    "DeepSpeed-Chat, end to end": """
        step actor-model reward-model actor-zero-stage reward-zero-stage output-dir deployment-type
    """,
}
OPTIONS = {
    "trlx: PPO": """
        ppo_epochs num_rollouts chunk_size init_kl_coef target horizon gamma lam cliprange
        cliprange_value vf_coef scale_reward ref_mean ref_std cliprange_reward gen_kwargs
        gen_experience_kwargs num_value_layers_unfrozen
    """,
    "trlx: model, optimiser and training": """
        model.model_path model.model_arch_type model.num_layers_unfrozen model.peft_config
        model.model_extra_configs tokenizer.tokenizer_path tokenizer.padding_side
        tokenizer.truncation_side tokenizer.tokenizer_extra_configs optimizer.name optimizer.kwargs
        scheduler.name scheduler.kwargs train.total_steps train.seq_length train.epochs
        train.batch_size train.minibatch_size train.checkpoint_interval train.eval_interval
        train.pipeline train.trainer train.trainer_kwargs train.project_name train.entity_name
        train.group_name train.checkpoint_dir train.rollout_logging_dir train.save_best
        train.save_optimizer train.resume_from_checkpoint train.tracker train.logging_dir
        train.tags train.seed
    """,
    "TRL: PPOTrainer": """
        PPOTrainer(model) PPOTrainer(ref_model) PPOTrainer(reward_model) PPOTrainer(value_model)
        PPOTrainer(processing_class) PPOTrainer(train_dataset) PPOTrainer(eval_dataset)
        PPOTrainer(peft_config) PPOTrainer(optimizers) PPOTrainer(callbacks) learning_rate
        dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size
        num_sample_generations response_length stop_token stop_token_id temperature
        missing_eos_penalty sft_model_path world_size num_total_batches micro_batch_size
        local_batch_size batch_size local_mini_batch_size mini_batch_size push_to_hub
        reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs whiten_rewards kl_coef
        kl_estimator cliprange vf_coef cliprange_value gamma lam ds3_gather_for_generation
    """,
}
# Of the articles only what must not be forgotten.
FEATURES = [
    "all three steps by one command",
    "adaptive KL",
    "blending",
    "Hybrid Engine",
    "inference API",
    "LoRA",
    "mixture training",
    "moving average",
    "one form for all data sets",
    "RLHF API: DeepSpeedRLHFEngine",
    "RLHF API: DeepSpeedPPOTrainer",
    "several nodes",
    "whitening of advantages",
    "ZeRO 3",
]
FLAWS = [str(number) for number in range(1, 18)]


def names(title: str) -> list[str]:
    """First cells of a table, sorted."""
    return sorted(row.name for row in SECTIONS[title].rows)


@pytest.mark.parametrize("title", FLAGS)
def test_every_flag_stands_there_once(title: str) -> None:
    assert names(title) == sorted(f"--{flag}" for flag in FLAGS[title].split())


@pytest.mark.parametrize("title", OPTIONS)
def test_every_option_stands_there_once(title: str) -> None:
    assert names(title) == sorted(OPTIONS[title].split())


def test_every_feature_stands_there_once() -> None:
    counts = Counter(row.name for row in ROWS)
    assert {name: counts[name] for name in FEATURES} == dict.fromkeys(FEATURES, 1)


def test_every_flaw_has_its_tests() -> None:
    rows = {row.name: row for row in SECTIONS["What differs on purpose"].rows}
    assert [name for name in rows if name.isdigit()] == FLAWS
    shown = {test.partition("::")[2] for row in rows.values() for test in row.tests}
    by_number = functions_of(ROOT / "tests" / "algorithms" / "test_departures.py")
    assert {name for name in by_number if name.startswith("test_bug_")} <= shown
    for name in by_number:
        if name.startswith("test_bug_"):
            number = str(int(name.split("_")[2]))
            assert name in {test.partition("::")[2] for test in rows[number].tests}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_no_cell_is_empty(section: Section) -> None:
    assert section.text.strip()
    assert len(section.heads) == len(ParityRow._fields)
    for row in section.rows:
        assert all(cell and cell != ("",) for cell in row)


def test_a_row_has_a_key_or_says_that_there_is_none() -> None:
    words = ("built in", "no ", "not ")
    free = SECTIONS["What differs on purpose"].rows  # a choice may be in no key
    assert not [
        row for row in ROWS if row not in free and not row.keys and not row.here.startswith(words)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_key_composes(key: str, compose: Compose) -> None:
    if key.startswith("rlhf."):
        assert key.removeprefix("rlhf.") in rlhf.__all__
    elif "=" in key:
        to_run_config(compose(shlex.split(key)))
    else:
        assert key in schema_types()


@cache
def functions_of(path: Path) -> set[str]:
    """Names of the functions in a file, also those of its classes."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("test", TESTS)
def test_named_test_exists(test: str) -> None:
    path, _, function = test.partition("::")
    assert function.startswith("test_")
    assert function in functions_of(ROOT / "tests" / path)


def test_row_by_hand() -> None:
    row = read_row("--a | x or y|z | `seed=1`, `name` | one.py::test_a, two.py::test_b")
    assert row == ("--a", "x or y|z", "`seed=1`, `name`", ("one.py::test_a", "two.py::test_b"))
    assert row.keys == ["seed=1", "name"]


def test_every_flag_is_translated_by_its_error() -> None:
    """The error for a flag names a key, unless its row says that there is none."""
    for title in FLAGS:
        for row in SECTIONS[title].rows:
            flag = row.name.removeprefix("--").replace("-", "_")
            known = flag in schema_types() or suggested_keys(flag, schema_types())
            assert known or "built in" in row.here, row.name
