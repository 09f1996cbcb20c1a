"""In which tier the tests of the contract run on each broker."""

from __future__ import annotations

from kinds import Kind
from tiers import FULL, QUICK, TEST

WHOLE = {"memory": QUICK, "lmdb": QUICK, "redis": TEST, "postgresql": TEST, "django": TEST}
"""The first tier that runs all tests on a broker. On the others ``make full`` does."""

ON_RABBITMQ = ("admin", "at_most_once", "features", "leases", "leases_alone", "put", "redelivery")
"""The files that ``make test`` runs on RabbitMQ: jobs and owners, and no clock to move."""

WHOLE_OVER_HTTP = (
    *("admin", "at_most_once", "features", "interrupted", "job_watch", "leases", "leases_alone"),
    *("messages", "put", "signals", "task_leases"),
)
"""The files that run over HTTP as a whole: owners, leases, wake-ups and broken lines. Of the others
only the tests in ``OVER_HTTP`` run: the store behind the server decides the rest, and it is LMDB.
"""

OVER_HTTP = {
    "admin": (
        "a_paused_queue_accepts_and_gives_nothing_out",
        "cancel_reaches_a_running_job_through_its_owner",
        "lost_tasks_are_leased_one_at_a_time",
        "owners_come_and_go",
    ),
    "alter": (
        "a_full_queue_takes_no_more_and_a_job_that_leaves_makes_room",
        "a_job_that_waits_for_others_needs_no_room",
        "a_store_that_departs_alters_nothing",
    ),
    "features": ("the_features_are_those_of_the_table",),
    "history": ("kinds_with_rows_are_listed", "rows_are_read_by_kind_span_time_and_name_in_order"),
    "keys": ("replace_of_a_running_job_becomes_its_successor",),
    "leases": ("each_report_of_progress_replaces_the_text_of_the_one_before",),
    "limit_holds": (
        "an_error_of_the_block_goes_before_a_lost_place",
        "holds_and_jobs_share_the_places",
    ),
    "limits": (
        "a_job_may_cost_more_than_one_token",
        "a_lease_that_may_have_run_refunds_no_token",
        "a_moved_job_does_not_change_a_limit_that_is_known",
        "a_queue_that_fails_in_a_row_pauses_probes_and_opens_again",
        "a_ready_job_has_a_place_behind_the_jobs_of_its_key",
        "limits_report_the_limit_of_a_job_and_its_opening_time",
    ),
    "notes": ("of_two_writers_the_first_replaces_a_note",),
    "purges": ("a_retry_with_a_due_time_schedules_the_job", "a_restore_leaves_the_jobs_of_a_flow"),
    "put": ("an_envelope_comes_back_as_it_was_put", "at_is_wall_time_and_the_past_is_now"),
    "redelivery": ("a_ttr_that_runs_out_is_a_failed_hand_out",),
    "rerun": ("a_failure_whose_key_another_success_holds_runs_again_by_force",),
    "retention": (
        "a_backup_can_be_opened",
        "a_page_ends_after_the_number_of_jobs_to_look_at",
        "a_young_result_outlives_a_short_keep",
        "find_by_the_beginning_of_an_id",
        "find_by_the_ending_of_an_id",
        "find_filters_by_everything",
        "info_says_which_broker_it_is",
        "oldest_is_the_ready_job_accepted_first",
    ),
    "schedules": (
        "a_change_that_fails_is_none_instead_either",
        "a_job_names_its_schedule",
        "a_worker_declares_and_a_producer_reads",
        "many_that_are_known_are_changed_and_struck_at_once",
        "schedules_are_adopted_unchanged",
    ),
    "task_leases": ("a_consumer_has_a_task_for_a_time",),
    "topics": (
        "a_binding_is_deleted_once",
        "a_store_that_departs_keeps_its_bindings",
        "no_binding_is_lost_when_several_threads_bind_at_once",
    ),
    "unique": ("a_put_moves_the_time_on_but_not_for_ever",),
    "unknown_tasks": ("a_job_of_an_unknown_task_is_tried_again_later_and_not_counted",),
    "workflows": (
        "a_lease_brings_the_ends_of_earlier_jobs",
        "bad_links_store_nothing",
        "followers_of_a_verdict_may_be_a_flow",
        "members_may_come_in_many_puts",
    ),
}
"""The tests that ``make test`` runs over HTTP, by file. Together they send each call of the
contract, each field of its messages and each error once."""


def proves_more(kind: Kind, file: str, test: str) -> bool:
    """Whether something can break in a test on this broker that cannot break on the others."""
    return not kind.served or file in WHOLE_OVER_HTTP or test in OVER_HTTP.get(file, ())


def tier_of_kind(kind: Kind, file: str, test: str) -> str:
    """The first tier that runs a test on a broker."""
    if kind.name == "rabbitmq":
        return TEST if file in ON_RABBITMQ else FULL
    if kind.name == "http":
        return TEST if test in OVER_HTTP.get(file, ()) else FULL
    return WHOLE.get(kind.name, FULL)
