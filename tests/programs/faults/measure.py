"""Faults in what measures: the bench, its rivals, tuning, the studies, their records, and the plots of pages."""

from faults.fault import listed

BENCH = "tests/tools/bench/test_bench.py"
TORCH = "tests/tools/bench/test_bench_torch.py"
TUNE = "tests/tools/bench/test_tune.py"
VLLM = "tests/tools/bench/test_vllm.py"
RECORD = "tests/tools/study/test_record.py"
HASH = [f"{RECORD}::test_what_is_measured_changes_the_hash_and_a_view_or_a_comment_does_not"]
STALE_KERNEL = ["tests/tools/bench/test_report.py::test_a_kernel_is_stale_where_its_source_has_changed"]
PLOTS = ["tests/docs/test_plots.py::test_shown_plots_are_drawn_once_and_all_others_removed"]
MODEL = "tests/tools/studies/test_model.py"
GENERATE = "tests/tools/studies/test_generate.py"
PARALLEL = "tests/tools/studies/test_bench_parallel.py"
FAULTS = listed(
    {
        "tools/bench/timing.py": {
            "bench-a-wrong-result-is-timed": (
                "        if difference := wrong():\n",
                "        if (difference := wrong()) and not us:\n",
                [f"{BENCH}::test_a_kernel_may_be_as_far_off_as_it_promises"],
            ),
            "bench-an-output-that-is-not-written-passes": (
                "        fresh()\n",
                "",
                [f"{TUNE}::test_what_is_wrong_or_fails_is_refused_and_never_timed"],
            ),
            "bench-the-first-contestant-is-always-first": (
                "rotated = names[start:] + names[:start]",
                "rotated = names",
                [f"{BENCH}::test_everybody_runs_in_turn_and_the_slow_are_spread"],
            ),
        },
        "tools/bench/bench.py": {
            "bench-the-fastest-alternative-is-not-compared": (
                "return self.checked(calls[best], fresh, wrong)._replace(chosen=best)",
                "return able[best]._replace(chosen=best)",
                [f"{BENCH}::test_alternatives_that_fail_or_are_wrong_are_not_timed"],
            ),
            "bench-what-a-rival-has-changed-is-not-restored": (
                "            alternatives.restore()\n",
                "",
                [f"{VLLM}::test_each_op_is_compared_and_timed_with_outputs_that_are_there_before"],
            ),
        },
        "tools/bench/cutlass/rival.py": {
            "bench-cutlass-runs-on-any-card": (
                "device.compute_capability == CAPABILITY",
                "device.compute_capability != (0, 0)",
                [f"{BENCH}::test_cutlass_is_found_where_the_folder_says_and_runs_on_its_card_only"],
            ),
        },
        "tools/bench/vllm.py": {
            "bench-vllm-gets-the-weight-in-another-order": (
                "weight.T, scale, weight_scale[:, None], None)",
                "weight.T, scale, weight_scale.flip(0)[:, None], None)",
                [f"{VLLM}::test_each_op_is_compared_and_timed_with_outputs_that_are_there_before"],
            ),
            "bench-vllm-is-any-library": (
                "            if found != wanted:\n",
                "            if found is None:\n",
                [f"{VLLM}::test_another_file_is_refused_before_anything_is_timed"],
            ),
        },
        "tools/bench/rivals.py": {
            "bench-a-rival-computes-something-else": (
                "return partial(torch_module()._int_mm, codes, weight.T)",
                "return partial(torch_module()._int_mm, codes, weight.flip(0).T)",
                [f"{TORCH}::test_torch_s_integer_product_is_the_sums"],
            ),
        },
        "tools/bench/lab.py": {
            "bench-the-cache-is-flushed-by-a-write-alone": (
                "        self._torch.sum(self._read, dim=0, out=self._sum)\n",
                "",
                [f"{TORCH}::test_a_flush_writes_and_then_reads"],
            ),
        },
        "tools/bench/logits.py": {
            "bench-a-rival-draws-from-one-token-more-than-top-p-says": (
                "p.cumsum(-1) - p >= top_p",
                "p.cumsum(-1) - p >= top_p + 0.1",
                [f"{TORCH}::test_rivals_draw_tokens_as_often_as_they_are_likely"],
            ),
        },
        "tools/bench/record.py": {
            "bench-a-kernel-that-changed-is-not-stale": (
                "sku is None or source_hash(sku) != self.source_hash",
                "sku is None or not self.source_hash",
                STALE_KERNEL,
            ),
            "bench-the-higher-ceiling-counts": (
                "return max(memory, compute) or None",
                "return min(memory, compute) or None",
                ["tests/tools/bench/test_report.py::test_the_least_time_is_that_of_the_lower_ceiling"],
            ),
        },
        "tools/bench/tune.py": {
            "tune-only-the-first-layer-is-compared": (
                "ulps) for _, outputs in layers)",
                "ulps) for _, outputs in layers[:1])",
                [f"{TUNE}::test_every_layer_is_compared"],
            ),
            "tune-the-luckiest-of-few-rounds-wins": (
                "if len(near) > 1:",
                "if len(near) > 99:",
                [f"{TUNE}::test_a_time_of_the_first_rounds_does_not_count_where_there_are_more"],
            ),
        },
        "tools/bench/tune_command.py": {
            "tune-an-older-file-changes-the-ranking": (
                'dispatcher = Dispatcher(tuning="")',
                "dispatcher = Dispatcher()",
                [f"{TUNE}::test_two_cpu_backends_from_the_shell_to_a_run"],
            ),
        },
        "dispatch/select/tuning.py": {
            "record-a-p10-above-the-median-loads": (
                "if not self.best <= self.p10 <= self.median <= self.p90:",
                "if not self.best <= self.median <= self.p90:",
                [RECORD],
            ),
        },
        "tools/study/record.py": {
            "record-a-stale-record-looks-fresh": (
                "if self.measurer_hash == measurer_hash(type(self)) else",
                "if self.measurer_hash else",
                ["tests/tools/study/test_run.py::test_a_stale_record_says_so"],
            ),
            "record-the-studies-are-not-hashed": (
                '_CODE = ("skuda.tools.bench", "skuda.tools.studies")',
                '_CODE = ("skuda.tools.bench",)',
                HASH,
            ),
            "record-its-own-module-makes-it-stale": ("(kind.__module__,)", "()", HASH),
        },
        "docs/plots.py": {
            "plots-that-of-another-record-is-kept": (
                'f"<dc:source>{digest}</dc:source>" in',
                'f"<dc:source>{digest[:0]}" in',
                PLOTS,
            ),
        },
        "tools/studies/model_bench.py": {
            "model-a-wrong-bit-is-timed": (
                "        if not wrong:\n",
                "        if runs:\n",
                [f"{MODEL}::test_one_wrong_bit_stops_a_phase"],
            ),
            "model-replays-are-not-compared": (
                '(("called", run.call), ("replayed", run.replay))',
                '(("called", run.call),)',
                [f"{MODEL}::test_a_replay_that_keeps_an_old_result_is_wrong"],
            ),
        },
        "tools/studies/generate.py": {
            "generate-any-number-of-tokens-is-timed": (
                "if list(counts) != [tokens] * len(prompts):",
                "if not counts:",
                [f"{GENERATE}::test_what_fails_or_gives_another_number_of_tokens_is_refused_and_said"],
            ),
            "generate-the-first-calls-count": (
                "Timing.of(found[_WARM_UP:])",
                "Timing.of(found)",
                [f"{GENERATE}::test_forms_run_in_turn_and_the_first_calls_do_not_count"],
            ),
        },
        "tools/studies/model.py": {
            "generate-bf16-over-ours-is-judged": (
                'return 1 / self.ratios["bf16"] if',
                'return self.ratios["bf16"] if',
                [f"{GENERATE}::test_the_time_of_ours_is_over_that_of_bf16"],
            ),
            "host-the-cost-of-a-compiled-function-counts-as-that-of-its-ops": (
                "(costs[name] - off) / (costs[over] - off)",
                "costs[name] / costs[over]",
                [f"{MODEL}::test_figures_are_judged_for_the_run_that_they_are_for"],
            ),
        },
        "tools/studies/parallel_rank.py": {
            "parallel-a-wrong-bit-is-timed": (
                "times = {} if wrong else self._timed(ready)",
                "times = self._timed(ready)",
                [f"{PARALLEL}::test_a_wrong_bit_on_one_rank_is_not_timed"],
            ),
        },
    }
)
