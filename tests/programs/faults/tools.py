"""Faults in the command line, in what it shows, ships and demonstrates, and in SmoothQuant's offline half."""

from __future__ import annotations

from faults.fault import Fault

CLI = "tests/tools/test_cli.py"
BAD = "tests/tools/test_cli_in_bad_conditions.py"
LIST = "tests/tools/show/test_list.py"
EXPLAIN = "tests/tools/show/test_explain.py"
DOCTOR = "tests/tools/show/test_doctor.py"
CACHE = ("tests/tools/ship/test_cache_commands.py",)
LOCK = "tests/tools/ship/test_selection_lock.py"
COMPILE = "tests/tools/ship/test_compile_ahead.py"
BUNDLE = "tests/dispatch/compile/test_bundle.py"
DEVICES = ("tests/tools/words/test_devices.py",)
SHAPES = ("tests/tools/words/test_model_shapes.py",)
DEMO = "tests/tools/demo/test_demo.py"
SMOOTH = ("tests/tools/test_smoothquant.py",)

FAULTS = [
    # The process and the words on its command line.
    Fault(
        "cli-an-interrupt-ends-with-the-status-of-the-command",
        "tools/cli.py",
        "return _INTERRUPTED if came else status",
        "return status",
        (f"{BAD}::test_an_interrupt_that_c_code_hides_is_one_too",),
    ),
    Fault(
        "cli-a-reader-that-has-left-is-a-success",
        "tools/cli.py",
        "    if isinstance(lost, BrokenPipeError):\n        status = _NO",
        "    if isinstance(lost, BrokenPipeError):\n        status = 0",
        (f"{CLI}::test_a_reader_that_leaves_causes_no_traceback",),
    ),
    Fault(
        "cli-a-defect-exits-as-bad-input-does",
        "tools/cli.py",
        "_NO, _BAD_INPUT, _DEFECT, _INTERRUPTED = 1, 2, 70, 130",
        "_NO, _BAD_INPUT, _DEFECT, _INTERRUPTED = 1, 2, 2, 130",
        (f"{CLI}::test_a_defect_is_not_dressed_up_as_bad_input",),
    ),
    Fault(
        "cli-no-near-name-is-suggested",
        "tools/output.py",
        "n=most, cutoff=0.55",
        "n=most, cutoff=0.99",
        (f"{CLI}::test_bad_input_is_answered_in_one_line",),
    ),
    Fault(
        "cli-elements-of-other-libraries-are-not-recognised",
        "tools/output.py",
        "return [element] if element in known else",
        "return",
        (f"{CLI}::test_bad_input_is_answered_in_one_line",),
    ),
    Fault(
        "cli-control-characters-reach-the-terminal",
        "tools/output.py",
        'c if c.isprintable() else c.encode("unicode_escape").decode()',
        "c",
        (f"{BAD}::test_one_line_is_one_and_printable",),
    ),
    Fault(
        "cli-an-absent-value-is-printed-as-none",
        "tools/output.py",
        '"" if value is None else " ".join',
        '"" if value is Ellipsis else " ".join',
        (f"{EXPLAIN}::test_unserved_is_explained_and_exits_with_1",),
    ),
    Fault(
        "files-of-any-size-are-read",
        "tools/files.py",
        "if len(content) > _LARGEST:",
        "if False:",
        (f"{BAD}::test_files_are_read_up_to_a_limit",),
    ),
    Fault(
        "files-pipes-and-devices-are-read",
        "tools/files.py",
        "with open_regular(path) as file:",
        'with path.open("rb") as file:',
        (f"{BAD}::test_files_are_read_up_to_a_limit",),
    ),
    Fault(
        "files-a-place-that-cannot-be-written-is-found-after-the-work",
        "tools/verify/command.py",
        'check("verify", "--output", output)',
        "pass",
        (f"{BAD}::test_a_place_that_cannot_be_written_is_refused_before_the_work",),
    ),
    # Problems, shapes and cards.
    Fault(
        "words-n-is-no-other-name-of-c-out",
        "tools/words/problem.py",
        '{"n": "c_out"}',
        '{"n": "k"}',
        (f"{EXPLAIN}::test_what_is_chosen_where",),
    ),
    Fault(
        "words-a-field-that-is-given-twice-counts-once",
        "tools/words/problem.py",
        "        if name in found:\n",
        "        if False:\n",
        (f"{CLI}::test_bad_input_is_answered_in_one_line",),
    ),
    Fault(
        "words-the-assumed-range-of-a-product-is-not-symmetric",
        "tools/words/problem.py",
        "return (-127, 127)",
        "return (-128, 127)",
        (f"{EXPLAIN}::test_assumed_values_are_shown",),
    ),
    Fault(
        "words-the-models-have-q-without-k-and-v",
        "tools/words/shapes.py",
        '"llama-3-8b": ((6144, 4096),',
        '"llama-3-8b": ((4096, 4096),',
        SHAPES,
    ),
    Fault(
        "words-random-shapes-may-take-a-minute",
        "tools/words/shapes.py",
        "if math.prod(shape) <= _LARGEST:",
        "if True:",
        SHAPES,
    ),
    Fault(
        "devices-a-card-of-other-memory-is-taken-for-a-known-one",
        "registry/device.py",
        "and all(word in full for word in words)",
        "",
        DEVICES,
    ),
    Fault(
        "devices-an-architecture-is-no-device",
        "registry/device.py",
        "if said == short or (arch and ",
        "if said == short or (False and ",
        DEVICES,
    ),
    Fault(
        "devices-a-card-that-is-too-old-is-not-reported",
        "tools/words/devices.py",
        "    usable = [arch for arch in archs if arch.runs_on(capability)]",
        "    usable = list(archs)",
        DEVICES,
    ),
    # What is shown.
    Fault(
        "list-an-architecture-without-kernels-lists-nothing",
        "tools/show/list.py",
        "        passing |= {arch for arch in registered if arch.runs_on(capability)}",
        "        passing |= {arch for arch in registered if arch.capability == capability}",
        (f"{LIST}::test_an_architecture_without_kernels_lists_the_older_ones_that_serve_it",),
    ),
    Fault(
        "list-the-weakest-guarantee-is-the-strongest",
        "tools/show/kernels.py",
        "worst = None if None in bounds else max(",
        "worst = None if None in bounds else min(",
        (f"{LIST}::test_list_on_a_terminal_shows_the_weakest_promise",),
    ),
    Fault(
        "list-verified-does-not-name-the-card",
        "tools/show/kernels.py",
        "return tally(map(judge, skus))",
        'return tally(map(judge, skus)).replace(" on H200", "")',
        (f"{LIST}::test_verified_names_the_card",),
    ),
    Fault(
        "list-a-failed-kernel-looks-like-others",
        "tools/show/list.py",
        'failed = any(judge(sku).word == "failed" for sku in skus)',
        "failed = False",
        (f"{LIST}::test_a_kernel_that_failed_shows_where",),
    ),
    Fault(
        "show-a-stale-kernel-is-verified",
        "tools/show/show.py",
        'found.word in ("verified", "reference")',
        'found.word in ("verified", "reference", "stale")',
        (f"{LIST}::test_no_kernel_shows_as_verified_whose_record_is_of_another_source_or_meaning",),
    ),
    Fault(
        "explain-exits-with-0-where-no-kernel-serves-the-problem",
        "tools/show/explain.py",
        "return 0 if found.chosen is not None else 1",
        "return 0",
        (f"{EXPLAIN}::test_unserved_is_explained_and_exits_with_1",),
    ),
    Fault(
        "explain-does-not-say-which-older-kernel-serves-a-card",
        "tools/show/explain.py",
        "*filter(None, [served])",
        "*()",
        (f"{EXPLAIN}::test_a_card_without_kernels_of_its_own_is_reported",),
    ),
    Fault(
        "explain-kernels-with-other-reasons-share-a-row",
        "tools/show/explain.py",
        "decision.sku if show_all else decision.reasons",
        "decision.sku if show_all else len(decision.reasons)",
        (f"{EXPLAIN}::test_nothing_empty_is_said_on_a_cpu",),
    ),
    Fault(
        "doctor-ends-with-0-without-a-required-package",
        "tools/show/doctor.py",
        'works = all(finding.state == "ok" for finding in found if finding.required)',
        "works = True",
        (f"{DOCTOR}::test_a_missing_required_package_fails",),
    ),
    Fault(
        "doctor-ends-with-0-with-a-broken-bundle",
        "tools/show/doctor.py",
        '("Bundles", True,',
        '("Bundles", False,',
        (f"{BUNDLE}::test_the_doctor_says_which_bundle_is_used_and_what_is_wrong_with_it",),
    ),
    Fault(
        "doctor-ends-with-0-with-a-broken-tuning-file",
        "tools/show/doctor.py",
        '("Tuning", True,',
        '("Tuning", False,',
        (f"{DOCTOR}::test_a_tuning_file_that_cannot_be_used_fails",),
    ),
    Fault(
        "doctor-trusts-a-cache-that-others-can-write",
        "tools/show/doctor.py",
        "    trouble = cache.distrust()",
        "    trouble = None",
        (f"{DOCTOR}::test_a_cache_that_cannot_be_used_fails",),
    ),
    Fault(
        "doctor-needs-typer",
        "tools/cli.py",
        'if given[:1] == ["doctor"]:',
        "if False:",
        (f"{DOCTOR}::test_the_doctor_works_where_a_required_package_does_not",),
    ),
    Fault(
        "doctor-compares-versions-as-text",
        "tools/show/doctor.py",
        "return SpecifierSet(wanted).contains(version, prereleases=True)",
        'return version >= wanted.lstrip("<>=!")',
        (f"{DOCTOR}::test_versions_are_compared_as_numbers",),
    ),
    # What is shipped.
    Fault(
        "diff-exits-with-0-where-locks-differ",
        "tools/ship/diff.py",
        "return 1 if found else 0",
        "return 0",
        (f"{LOCK}::test_other_problems_and_devices_are_reported",),
    ),
    Fault(
        "diff-says-nothing-of-equal-files",
        "tools/ship/diff.py",
        "    if not found:\n        tell(",
        "    if False:\n        tell(",
        (f"{LOCK}::test_nothing_differs_where_nothing_changed",),
    ),
    Fault(
        "diff-slower-and-faster-are-swapped",
        "tools/ship/diff.py",
        'return "slower" if now.us > was.us else "faster"',
        'return "faster" if now.us > was.us else "slower"',
        (f"{LOCK}::test_a_small_refit_is_no_change",),
    ),
    Fault(
        "diff-a-lost-guarantee-is-called-a-gain",
        "tools/ship/diff.py",
        "if exceeds(old, new) is not None:",
        "if exceeds(new, old) is not None:",
        (f"{LOCK}::test_every_change_is_reported",),
    ),
    Fault(
        "lock-a-place-in-the-ranking-counts-kernels-of-other-cards",
        "tools/ship/lock.py",
        "rank = sum(sku.arch.runs_on(device.compute_capability) for sku in ",
        "rank = sum(True for sku in ",
        (f"{LOCK}::test_a_place_in_the_ranking_counts_what_the_device_could_run",),
    ),
    Fault(
        "lock-names-kernels-that-it-does-not-list",
        "tools/ship/lock.py",
        'does not list it; make it again with `skuda lock`" if lacking else ""',
        'does not list it; make it again with `skuda lock`" if False else ""',
        (f"{LOCK}::test_bad_input_is_reported_in_one_line",),
    ),
    Fault(
        "compile-a-kernel-that-is-not-kept-is-called-compiled",
        "tools/ship/cubins.py",
        "        if backend.cached(sku, launch, device):\n            return",
        "        if True:\n            return",
        (f"{COMPILE}::test_what_cannot_be_kept_is_not_called_compiled",),
    ),
    Fault(
        "compile-leaves-out-the-cards-of-arch-where-device-is-given",
        "tools/ship/compile.py",
        "    found += [card for arch in split(archs) for card in cards_of(command, arch)]",
        "    found = found or [card for arch in split(archs) for card in cards_of(command, arch)]",
        (f"{COMPILE}::test_each_card_gets_its_own",),
    ),
    Fault(
        "compile-ends-with-0-where-a-kernel-failed",
        "tools/ship/compile.py",
        'return 1 if any(outcome.state == "failed" for outcome in found) else 0',
        "return 0",
        (f"{COMPILE}::test_a_failure_is_reported_and_the_rest_goes_on",),
    ),
    Fault(
        "bundle-is-written-without-the-kernels-that-failed",
        "tools/ship/bundle.py",
        'if any(outcome.state == "failed" for outcome in found):',
        "if False:",
        (f"{BUNDLE}::test_where_a_kernel_does_not_compile_nothing_is_written",),
    ),
    Fault(
        "bundle-with-a-damaged-cubin-passes-show",
        "tools/ship/bundle.py",
        "return 1 if troubles else 0",
        "return 0",
        (f"{BUNDLE}::test_a_cubin_that_was_changed_is_refused_when_it_is_read",),
    ),
    Fault(
        "bundle-show-accepts-what-loading-refuses",
        "dispatch/compile/bundle.py",
        "                self.load(member)",
        "                self.read(member)",
        (f"{BUNDLE}::test_a_cubin_that_is_none_is_refused",),
    ),
    Fault(
        "cache-is-cleared-where-nobody-can-be-asked",
        "tools/ship/cache.py",
        "if not sys.stdin.isatty():",
        "if False:",
        CACHE,
    ),
    Fault(
        "cache-a-week-has-five-days",
        "tools/ship/cache.py",
        '"w": 7 * 86400',
        '"w": 5 * 86400',
        CACHE,
    ),
    Fault(
        "cache-verify-ends-with-0-where-an-entry-is-wrong",
        "tools/ship/cache.py",
        "return 1 if only_wrong and shown else 0",
        "return 0",
        CACHE,
    ),
    # The demo.
    Fault(
        "demo-accuracy-that-is-not-a-number-passes",
        "tools/demo/command.py",
        "all(way.worst_cosine >= self.required_cosine for way",
        "not any(way.worst_cosine < self.required_cosine for way",
        (f"{DEMO}::test_the_verdict_is_plain",),
    ),
    Fault(
        "demo-the-held-out-half-calibrates",
        "tools/demo/command.py",
        "calibration, held_out = tokens[0::2], tokens[1::2]",
        "calibration, held_out = tokens, tokens[1::2]",
        (f"{DEMO}::test_the_job_measures_everything_it_reports",),
    ),
    Fault(
        "demo-attention-sees-the-padding",
        "tools/demo/encoder.py",
        "scores = np.where(mask[:, None, None, :], scores, np.float32(-np.inf))",
        "scores = np.where(True, scores, np.float32(-np.inf))",
        (f"{DEMO}::test_the_mask_keeps_attention_within_a_sentence",),
    ),
    Fault(
        "demo-a-gpu-that-is-asked-for-is-not-used",
        "tools/demo/placed.py",
        '    if gpu is None or where == "host":\n',
        "    if True:\n",
        (f"{DEMO}::test_where_the_demo_runs",),
    ),
    Fault(
        "demo-nothing-is-said-while-it-runs-in-a-pipe",
        "tools/demo/command.py",
        "                stages.add(stage)\n                tell(",
        "                stages.add(stage)\n                str(",
        (f"{DEMO}::test_progress_is_reported_where_nobody_sees_a_bar",),
    ),
    # SmoothQuant.
    Fault(
        "smoothquant-the-weight-is-not-smoothed",
        "tools/smoothquant.py",
        "activation_max / smooth, matrix * smooth",
        "activation_max / smooth, matrix",
        SMOOTH,
    ),
    Fault(
        "smoothquant-a-later-batch-replaces-the-range",
        "tools/smoothquant.py",
        "batch if seen is None else np.maximum(seen, batch)",
        "batch",
        SMOOTH,
    ),
    Fault(
        "smoothquant-negative-values-have-no-range",
        "tools/smoothquant.py",
        "np.maximum(high, -low)",
        "high",
        SMOOTH,
    ),
    Fault(
        "checkpoint-a-tensor-that-nobody-named-is-accepted",
        "tools/checkpoint.py",
        "for key in sorted(wanted.keys() | found.keys()):",
        "for key in sorted(wanted.keys()):",
        SMOOTH,
    ),
    Fault(
        "checkpoint-another-version-is-read",
        "tools/checkpoint.py",
        '(("format", FORMAT), ("version", FORMAT_VERSION))',
        '(("format", FORMAT),)',
        SMOOTH,
    ),
]
