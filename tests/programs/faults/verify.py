"""Faults in the verifier itself: checks that are left out, comparisons that see less, and records that say too much."""

from faults.fault import listed

VERIFY = "tests/tools/verify/test_verify.py"
KIT = "tests/tools/verify/test_kit_faults.py"
PLACEMENT = "tests/tools/verify/test_placement.py"
TESTING = "tests/tools/verify/test_testing.py"
LARGE = "tests/tools/verify/test_large.py"
HASHES = "tests/tools/verify/test_fingerprint.py"


def kit(*names: str) -> list[str]:
    """Return the tests of some faults of the kit."""
    return [f"{KIT}::test_a_planted_fault_fails_its_check[{name}]" for name in names]


FAULTS = listed(
    {
        "tools/verify/checks.py": {
            "verify-only-the-first-kernel-that-is-named": (
                "(not skus or sku.id in skus)",
                "(not skus or sku.id == next(iter(skus)))",
                [f"{VERIFY}::test_one_failure_stops_nothing_and_the_seed_draws_the_same_again"],
            ),
            "verify-passes-over-a-reference-that-fails": (
                'trial.fail("meaning", Broken(message, case=numbered.number))',
                "trial.note = message",
                [f"{VERIFY}::test_a_reference_that_fails_is_a_failure_of_the_kernel"],
            ),
            "verify-a-backend-may-serve-what-its-constraints-refuse": (
                'raise Broken(f"{problem!r} was planned, and its constraints refuse it")',
                "pass",
                [f"{TESTING}::test_a_problem_that_a_constraint_refuses_and_a_backend_plans_is_found"],
            ),
            "verify-a-promise-that-was-not-tested-counts-as-tested": (
                "    if promise not in trial.tried:\n        raise NotRun(otherwise)\n",
                "",
                [f"{KIT}::test_a_promise_without_a_case_for_it_is_not_recorded"],
            ),
        },
        "tools/verify/verification.py": {
            "verify-a-full-battery-leaves-out-checks": (
                '(check.spot or trial.battery == "full")',
                "check.spot",
                [f"{VERIFY}::test_a_right_kernel_has_the_full_battery_and_the_record_says_how_much_was_run"],
            ),
            "verify-goes-on-after-a-device-is-lost": (
                'self.lost_to = trial.sku.id if trial.failures and not self._answers() else ""',
                'self.lost_to = ""',
                [f"{VERIFY}::test_what_comes_behind_a_lost_device_is_skipped"],
            ),
            "verify-records-cases-as-runs": (
                "runs=trial.runs,",
                "runs=trial.cases_run,",
                [f"{VERIFY}::test_a_right_kernel_has_the_full_battery_and_the_record_says_how_much_was_run"],
            ),
        },
        "tools/verify/trial.py": {
            "verify-runs-the-first-layout-only": (
                'for layout in (*layouts, "contiguous", *LAYOUTS):',
                "for layout in layouts[:1]:",
                [f"{VERIFY}::test_a_right_kernel_has_the_full_battery_and_the_record_says_how_much_was_run"],
            ),
            "verify-takes-a-write-beside-an-array": (
                "        if beside := call.spoilt():",
                "        if (beside := call.spoilt()) and beside[0] in call.outputs:",
                kit("works_in_its_input"),
            ),
            "verify-a-second-run-like-the-first": (
                'self._again("deterministic", plan, example, layout, 1)',
                'self._again("deterministic", plan, example, layout, 0)',
                kit("reads_past_the_end"),
            ),
            "verify-draws-the-same-from-every-seed": (
                "np.random.default_rng([self.seed, zlib.crc32(name.encode())])",
                "np.random.default_rng([zlib.crc32(name.encode())])",
                [f"{VERIFY}::test_one_failure_stops_nothing_and_the_seed_draws_the_same_again"],
            ),
        },
        "tools/verify/compare.py": {
            "verify-a-nan-is-near-every-number": (
                "apart &= ~(nan_got & nan_want)",
                "apart &= ~(nan_got | nan_want)",
                [f"{VERIFY}::test_differing"],
            ),
        },
        "tools/verify/placement.py": {
            "verify-does-not-compare-guard-zones": (
                "            if changed.any():",
                "            if changed.any() and not allow_outputs:",
                [PLACEMENT],
            ),
            "verify-outputs-are-not-poisoned-otherwise-in-the-second-run": (
                "_POISON[turn] if is_float(dtype) or turn else 0xA6",
                "_POISON[0] if is_float(dtype) else 0xA6",
                [f"{PLACEMENT}::test_two_runs_have_other_bytes_around_arrays_and_other_poison"],
            ),
        },
        "tools/verify/large.py": {
            "verify-compares-the-first-copy-only": (
                "others = np.flatnonzero(trial.placement.download((rows != rows[0]).any(1)))",
                "others = np.zeros(0, int)",
                [f"{LARGE}::test_each_kind_of_fault_of_a_large_problem_is_caught"],
            ),
        },
        "tools/verify/calls.py": {
            "verify-does-not-see-what-a-bound-call-keeps": (
                "            call.rewrite(**contents)\n",
                "            call.rewrite()\n            present, outputs = example, want\n",
                kit("binding_scale"),
            ),
        },
        "tools/verify/evidence.py": {
            "verify-believes-a-record-of-another-kernel": (
                "if (one.source_hash, one.reference_hash) == today]",
                "if today]",
                [f"{VERIFY}::test_a_record_speaks_for_this_very_kernel_only"],
            ),
            "verify-believes-a-record-of-other-verifying-code": (
                "if file.verifier_hash == verifier_hash()[:_DIGITS]]",
                "if file.verifier_hash]",
                [f"{HASHES}::test_evidence_of_other_verifying_code_is_stale"],
            ),
            "verify-counts-runs-as-outputs": (
                "sum(one.outputs for one in found)",
                "sum(one.runs for one in found)",
                [f"{VERIFY}::test_verify_list_and_show"],
            ),
            "verify-loads-a-record-with-one-kernel-twice": (
                "if not self.skus or twice:",
                "if not self.skus:",
                [f"{VERIFY}::test_an_impossible_record_is_refused"],
            ),
        },
        "tools/verify/command.py": {
            "verify-ends-with-0-after-a-failure": (
                "return 1 if found.failed else 0",
                "return 0",
                [f"{VERIFY}::test_a_failure_exits_with_1_and_names_the_command_that_repeats_it"],
            ),
            "verify-names-a-command-with-another-seed": (
                "--seed {found.seed}",
                "--seed 0",
                [f"{VERIFY}::test_a_failure_exits_with_1_and_names_the_command_that_repeats_it"],
            ),
        },
        "tools/testing.py": {
            "verify-a-misspelt-attribute-of-a-suite-is-ignored": (
                "if near and name not in",
                "if not near and name not in",
                [f"{TESTING}::test_a_misspelt_attribute_of_a_suite_gets_advice"],
            ),
        },
    }
)
