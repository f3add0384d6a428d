"""What must still be there: a row for each feature, and the tests through public doors that judge it.

A test is named by its name alone, wherever it lies, so that files can move; one that is gone fails its row.
Its cases count together; `name[text` are those whose parameters begin with the text.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import pytest

from tests.judges import selection
from tests.judges.figures import ROOT, sources, text_of

FEATURES: Final = {
    "the loop of the README": "test_the_loop_of_the_readme_saves_resumes_and_keeps",
    "asynchronous saves": """
        test_the_state_saved_is_that_of_the_call_whatever_comes_after
        test_interpreter_exit_without_close_still_commits test_a_save_returns_before_it_is_written""",
    "overlapped saves": """
        test_training_that_changes_everything_after_the_call_does_not_reach_the_checkpoint
        test_wait_staged_guards_every_save_in_flight_and_so_does_a_step""",
    "DDP, FSDP1, FSDP2, HSDP, TP": """
        test_every_strategy_loads_what_others_saved test_every_strategy_goes_on_bit_for_bit_on_every_rank""",
    "PP, EP": """
        test_stages_experts_and_a_critic_resume_where_they_were_saved
        test_the_whole_model_resumes_from_stages test_stages_resume_from_the_whole_model""",
    "CPU offload, layouts": """
        test_it_resumes_bit_for_bit_on_the_same_ranks_and_trains_on_as_if_it_had_not_stopped
        test_one_process_loads_it_bit_for_bit""",
    "placements": "test_every_placement_is_saved_and_read_back_bit_for_bit",
    "low-bit tensors": """
        test_a_quantised_optimizer_of_torchao_goes_on_bit_for_bit_and_stock_reads_it
        test_4_bit_weights_of_bitsandbytes_come_back_with_the_offset_of_their_scales""",
    "shapes": """
        test_it_loads_bit_for_bit_in_a_fresh_process_or_the_save_says_no test_nothing_else_is_said""",
    "stock DCP both ways": """
        test_stock_load_the_converter_and_torch_read_it_and_find_its_checksums
        test_what_stock_wrote_is_loaded_as_ever""",
    "contents=trainable": """
        test_what_is_trained_resumes_exactly_and_the_base_is_not_written
        test_another_base_is_refused_before_anything_changes""",
    "tiers": """
        test_every_due_checkpoint_is_a_root_of_its_own_in_the_tier_byte_by_byte
        test_each_tier_has_its_own_retention_and_keeps_its_newest_until_a_newer_one_is_there
        test_what_a_run_has_left_is_uploaded_by_the_next_and_continued_from_where_it_was""",
    "resume from the nearest": """
        test_the_newest_over_all_tiers_is_resumed test_of_equal_steps_the_nearest_copy_is_read
        test_damage_falls_back_to_the_same_step_in_the_next_tier""",
    "buckets: S3, GCS, Azure": """
        test_a_job_saves_in_parts_prunes_and_is_resumed_and_leaves_nothing_else
        test_every_command_takes_a_bucket_with_its_options""",
    "disks of nodes": """
        test_a_checkpoint_on_the_disks_of_two_nodes_is_resumed_from_both
        test_a_lost_node_is_told_at_the_resume_and_nothing_starts_afresh""",
    "replicas on a partner's disk": """
        test_twins_lie_on_the_disk_of_another_node_so_that_one_node_may_be_lost
        test_any_one_file_may_be_lost_or_damaged_and_the_checkpoint_still_loads_bit_for_bit""",
    "retention": """
        test_a_plan_never_empties_a_history_and_accounts_for_every_checkpoint
        test_a_plan_says_why_each_stays_and_lists_drops_from_the_lowest
        test_best_takes_lowest_or_highest_and_of_equals_the_newer""",
    "nothing goes before one is whole": """
        test_a_prune_in_the_process_that_saved_never_leaves_only_a_damaged_one
        test_pruning_with_a_rotten_marker_deletes_nothing_newer""",
    "pins and marks": """
        test_pin_and_unpin test_a_step_marked_as_bad_is_passed_over_until_the_mark_is_taken_away
        test_two_processes_that_change_pins_or_marks_at_once_lose_nothing""",
    "lineages": """
        test_going_back_and_training_on_leaves_behind_what_came_after
        test_a_resumed_run_stays_on_its_line_however_often""",
    "diverged replicas": "test_ranks_that_differ_are_never_mixed",
    "one writer of a root": """
        test_a_second_job_is_refused_and_told_who_holds_the_root
        test_a_predecessor_that_wakes_up_late_can_neither_commit_nor_touch_what_came_after""",
    "preemption": """
        test_preemption_signal_saves_once_and_stops
        test_what_one_rank_alone_sees_stops_all_at_the_same_step""",
    "policies": """
        test_save_policies_read_as_they_are_written test_retention_policies_read_as_they_are_written
        test_combinators_are_the_logic_they_spell test_continuous_saves_follow_one_another
        test_no_interval_loses_less_than_the_optimum test_a_run_spends_the_fraction_that_it_may""",
    "resume in all hosts": "test_every_host_resumes_in_the_middle_of_a_shuffled_epoch",
    "resume: Lightning": """
        test_a_resume_goes_on_at_the_very_next_batch
        test_a_resume_sees_the_data_of_the_uninterrupted_training""",
    "resume: Fabric": """
        test_a_resumed_training_is_the_uninterrupted_one test_the_position_in_the_data_is_kept""",
    "resume: Accelerate": "test_a_resume_in_the_middle_of_an_epoch_is_exact_on_two_ranks",
    "resume: Trainer": "test_a_resume_is_exact_and_training_is_as_without_us",
    "elastic positions": """
        test_over_four_two_three_ranks_and_one_every_sample_of_the_epoch_is_seen_once
        test_data_on_other_ranks test_other_ranks_see_every_sample_of_the_epoch_once""",
    "override": """
        test_a_crash_after_an_override_resumes_as_if_never_stopped
        test_accelerate_goes_on_from_an_override_as_if_never_stopped""",
    "gradients": """
        test_gradients_that_wait_for_a_step_of_the_script_are_resumed
        test_a_save_within_a_window_resumes_with_its_gradients_and_its_place_in_it""",
    "signing": """
        test_resume_passes_over_what_is_not_trusted_and_says_so_and_does_not_mark_it
        test_a_signature_covers_the_manifest_that_is_committed""",
    "nothing runs code": """
        test_no_canary_in_any_file_runs_in_the_manager_or_a_command
        test_no_canary_in_a_checkpoint_of_stock_dcp_runs""",
    "journal": """
        test_runs_that_follow_one_another_are_told_in_order
        test_a_run_that_dies_is_unclean_and_what_it_lost_is_known""",
    "ckpt report": """
        test_the_command_writes_text_json_and_a_page
        test_the_page_needs_no_network_and_its_picture_is_whole""",
    "ckpt plan": """
        test_a_plan_of_a_real_model_is_what_its_save_writes
        test_the_command_prints_every_assumption_with_its_option""",
    "ckpt diff": """
        test_every_difference_of_tensors_is_named_with_figures
        test_equal_states_are_equal_whatever_the_manifests_say""",
    "ckpt ls, show, verify, prune": """
        test_ls_shows_the_committed_and_names_the_torn test_show_tells_what_a_checkpoint_promises
        test_verify_marks_what_is_damaged_once_and_says_so
        test_a_dry_run_says_what_would_go_and_touches_nothing
        test_every_command_keeps_to_the_schema_of_its_json""",
    "ckpt cp": """
        test_cp_copies_a_run_there_and_back_and_says_what_it_did
        test_a_killed_cp_is_continued_by_the_same_command""",
    "YAML": """
        test_yaml_and_toml_spell_the_same_options
        test_the_callback_comes_from_yaml_and_the_config_survives_its_own_dump""",
    "launcher": "test_an_unchanged_script_gets_it_from_accelerate_launch_and_a_file",
    "plugin": """
        test_save_checkpoint_and_a_model_checkpoint_go_through_the_core test_the_plugin_comes_from_yaml""",
    "telemetry": """
        test_every_sink_gets_every_event test_events_are_spans_and_metrics_of_opentelemetry
        test_the_trainers_callbacks""",
    "PEFT's own files": "test_what_peft_reads_is_what_was_trained",
    "installed is not asked for": """
        test_hosts_are_as_they_were_whatever_of_ours_is_imported
        test_the_package_registers_nothing_with_a_host""",
    "golden files of the format": "test_the_table_of_format_version_2_is_frozen",
    "damage is found": """
        test_no_damage_loads_wrong_values test_files_that_are_cut_lost_or_exchanged_are_noticed""",
    "faults of storage": """
        test_a_disk_that_is_full_at_any_moment_of_a_save_costs_that_save_only
        test_an_fsync_that_failed_is_not_tried_again_and_its_file_is_discarded""",
}
SWEEPS: Final = {
    "kills, power cuts, copies": """
        test_a_kill_at_any_system_call_on_any_rank_loses_no_acknowledged_checkpoint
        test_a_power_cut_at_any_system_call_loses_no_acknowledged_checkpoint
        test_kills_at_random_moments_of_a_tight_save_loop_lose_no_acknowledged_checkpoint
        test_a_copy_killed_at_any_system_call_counts_for_nothing_or_is_whole_and_is_completed""",
    "kills of uploads": """
        test_a_kill_during_an_upload_loses_no_acknowledged_checkpoint_of_either_tier
        test_a_power_cut_during_an_upload_loses_no_acknowledged_checkpoint_of_either_tier""",
    "kills of nodes": """
        test_a_kill_between_the_renames_of_two_nodes_leaves_one_checkpoint_to_all_ranks
        test_a_kill_and_lost_nodes_leave_what_is_durable_to_all_ranks""",
    "kills in buckets": "test_a_kill_at_sampled_requests_and_sampled_faults_lose_nothing",
    "killed trainings": "test_killed_trainings_go_on_exactly_to_their_end_and_leave_nothing_behind",
    "faults of storage, everywhere": """
        test_whatever_system_call_fails_the_error_is_the_documented_one_and_nothing_is_lost""",
    "faults of ranks": """
        test_whatever_fails_on_a_rank_all_others_are_told_in_time_and_nothing_is_lost""",
    "readers of mutated files": "test_no_reader_raises_anything_but_our_errors_or_gives_a_wrong_value",
    "the outside referee": "test_an_outside_referee_finds_no_kill_that_loses_or_changes_anything",
    "the exactness matrix, a sample": "test_every_pair_of_values_is_exact",
    "preemption in every host": "test_a_preemption_leaves_one_last_checkpoint_at_one_agreed_step",
    "starts again in place": """
        test_ranks_killed_at_any_moment_are_started_again_in_place_and_end_with_the_same_weights""",
}


@dataclass(kw_only=True)
class Ended:
    """Collects how the cases of every test ended."""

    outcomes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = report.nodeid.rpartition("::")[2]
        self.seconds[case] += report.duration
        if report.when == "call" or not report.passed:
            self.outcomes[case].append("passed" if hasattr(report, "wasxfail") else report.outcome)


def run(only: str, *, workers: int, thorough: bool) -> int:
    """Run the rows with a word in their name, print the table; 1 if a row does not hold."""
    table = {**FEATURES, **(SWEEPS if thorough else {})}
    rows = {name: tests.split() for name, tests in table.items() if only.lower() in name.lower()}
    wanted = {test for tests in rows.values() for test in tests}
    places = _places({test.partition("[")[0] for test in wanted})
    ended = Ended()
    os.environ[selection.VARIABLE] = " ".join(wanted)
    options = ["-q", "--no-header", "-p", "tests.judges.selection", "--rootdir", str(ROOT), "-r", "fE"]
    parallel = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
    pytest.main([*options, *parallel, *sorted(set().union(*places.values()))], plugins=[ended])
    return _show(rows, ended)


def _places(names: set[str]) -> dict[str, set[str]]:
    """Name -> the files that have a test of it."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in sources(ROOT / "tests"):
        for name in re.findall(r"^(?:async )?def (test_\w+)", text_of(path), re.MULTILINE):
            if name in found:
                found[name].add(str(path))
    return found


def _show(rows: dict[str, list[str]], ended: Ended) -> int:
    failed = 0
    print(f"\n{'must still be there':34}{'cases':>6}{'seconds':>9}")
    for row, tests in rows.items():
        cases = {test: [case for case in ended.outcomes if selection.is_of(case, test)] for test in tests}
        all_of = [case for found in cases.values() for case in found]
        wrong = [case for case in all_of if "failed" in ended.outcomes[case]]
        wrong += [f"missing: {test}" for test, found in cases.items() if not found]
        skipped = sum("skipped" in ended.outcomes[case] for case in all_of)
        failed += bool(wrong)
        told = "FAILED " + "; ".join(wrong) if wrong else "ok" + f", {skipped} skipped" * bool(skipped)
        print(f"{row:34}{len(all_of):>6}{sum(ended.seconds[case] for case in all_of):>9.1f}  {told}")
    print(f"{len(rows) - failed} of {len(rows)} hold")
    return int(failed > 0)
