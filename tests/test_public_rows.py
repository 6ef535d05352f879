"""Each of 71 cases that went wrong in public is a case of a table, or has a test of its own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.data.test_public_cases import REFUSED as REFUSED_ROWS
from tests.data.test_public_cases import USED as USED_ROWS
from tests.jobs.test_public_commands import REFUSED_WORDS, SWEPT
from tests.models.test_public_models import REFUSED, SAMPLED, USED

ROOT = Path(__file__).parents[1]
TABLES = (USED_ROWS, REFUSED_ROWS, REFUSED, USED, SAMPLED, REFUSED_WORDS, SWEPT)

DATA, COMMANDS = "tests/data/test_public_cases.py::", "tests/jobs/test_public_commands.py::"
MODELS = "tests/models/test_public_models.py::"
OF_THEIR_OWN: dict[int, str] = {
    20: f"{DATA}test_columns_of_rewards_are_columns_of_the_file",
    21: f"{DATA}test_columns_of_rewards_are_columns_of_the_file",
    22: f"{DATA}test_advice_names_phases_that_the_data_supports",
    26: f"{DATA}test_files_are_refused_by_name",
    27: f"{DATA}test_files_are_refused_by_name",
    28: f"{DATA}test_files_named_for_evaluation_are_held_out_and_printed",
    29: f"{DATA}test_files_are_refused_by_name",
    32: f"{DATA}test_text_cells_are_texts",
    33: f"{DATA}test_files_are_refused_by_name",
    36: f"{DATA}test_messages_reach_the_template_as_they_are",
    37: f"{DATA}test_rows_that_a_template_cannot_render_are_counted_with_the_first_place",
    38: f"{DATA}test_templates_are_refused_with_the_way_out",
    39: f"{DATA}test_messages_reach_the_template_as_they_are",
    40: f"{DATA}test_templates_are_refused_with_the_way_out",
    41: f"{DATA}test_an_answer_of_text_keeps_its_indentation",
    43: "tests/options/lora/test_lora.py::test_an_adapter_over_an_adapter_is_merged_twice",
    45: "tests/runtime/test_start_checks.py::test_both_doors_refuse_before_the_first_phase",
    47: "tests/runtime/test_start_checks.py::test_both_doors_refuse_before_the_first_phase",
    48: f"{MODELS}test_layers_without_a_cache_are_refused_before_training",
    51: f"{MODELS}test_embeddings_hold_all_tokens",
    52: f"{MODELS}test_a_tokenizer_without_padding_pads_with_its_end",
    56: "tests/jobs/test_input_files.py::test_a_changed_file_is_named_when_a_run_is_resumed",
    57: "tests/jobs/test_input_files.py::test_a_size_of_an_experiment_does_not_stand_for_a_file",
    62: "tests/config/test_run_dir.py::test_same_second_gets_a_number",
    64: "tests/runtime/test_rendezvous.py::test_ranks_started_by_another_launcher_join_one_run",
    65: f"{COMMANDS}test_weights_and_biases_that_is_switched_off_is_refused_before_training",
    66: "tests/jobs/test_data_refusals.py::test_a_plan_refuses_what_a_run_refuses",
    67: f"{DATA}test_numbers_follow_the_documented_grammar",
    68: f"{COMMANDS}test_runs_are_read_where_they_were_moved",
    69: f"{COMMANDS}test_runs_are_read_where_they_were_moved",
    70: f"{COMMANDS}test_chinese_data_is_described_on_an_ascii_terminal",
}
# What no quick test without a network repeats of these cases.
NOT_REPEATED = {
    39: "the templates of 30 families are public files: four of their kinds are rendered",
    49: "19 families ran all three phases: one of them samples here, with dropout in its config",
    64: "accelerate is not installed for tests, so other launchers start the ranks",
}


def test_every_public_case_has_a_test() -> None:
    in_tables = {int(row[0]) for table in TABLES for row in table}
    assert not in_tables & OF_THEIR_OWN.keys(), "no row is named twice"
    assert sorted(in_tables | OF_THEIR_OWN.keys()) == list(range(1, 72))
    assert NOT_REPEATED.keys() <= in_tables | OF_THEIR_OWN.keys()
    for test in OF_THEIR_OWN.values():
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test
