"""Faults in `skuda.dispatch`: selection, binding, streams, the cubin cache, bundles, plug-ins, telemetry, shards."""

from faults.fault import listed

SELECTION = ["tests/dispatch/select/test_selection.py"]
ARGUMENTS = ["tests/registry/test_argument.py"]
TUNING = ["tests/dispatch/select/test_tuning.py"]
DISPATCHER = ["tests/dispatch/test_dispatcher.py"]
BINDING = ["tests/dispatch/cuda/test_binding.py"]
CAPTURES = ["tests/dispatch/cuda/test_captures.py"]
BOUND = ["tests/dispatch/host/test_bound.py"]
CACHE = ["tests/dispatch/compile/test_cubin_cache.py", "tests/dispatch/compile/test_cache_damage.py"]
BUNDLE = ["tests/dispatch/compile/test_bundle.py"]
PLUGINS = ["tests/dispatch/plugins/test_plugins.py"]
TELEMETRY = ["tests/dispatch/test_telemetry.py"]
SHARDS = ["tests/dispatch/shard"]
FAULTS = listed(
    {
        "dispatch/select/match.py": {
            "select-a-card-of-unknown-capability-is-a-cpu": (
                "same_processor or not sku.arch.runs_on(self.device.compute_capability",
                "sku.arch.runs_on(self.device.compute_capability",
                SELECTION,
            ),
            "select-what-is-missing-here-matters-for-absent-cards": (
                "obstacles if device.ordinal is not None else NO_OBSTACLES",
                "obstacles",
                SELECTION,
            ),
            "select-a-workspace-may-not-be-as-large-as-the-limit": ("problem) <= most", "problem) < most", SELECTION),
            "select-a-shortlist-for-any-preference": (
                "problem.key(), device, preference, obstacles)",
                "problem.key(), device, NO_PREFERENCE, obstacles)",
                SELECTION,
            ),
            "select-a-size-that-a-constraint-refuses": ("return False", "return True", SELECTION),
        },
        "dispatch/dispatcher.py": {
            "select-a-call-is-recognized-for-another-preference": (
                "asked = (problem, preference)",
                "asked = (problem, None)",
                DISPATCHER,
            ),
        },
        "dispatch/planner.py": {
            "select-plans-of-two-preferences-are-one": (
                "key = (problem, preference, where) if",
                "key = (problem, where) if",
                SELECTION,
            ),
            "select-the-cache-of-plans-grows": ("self._plans) >=", "self._plans) > 2 *", SELECTION),
            "select-threads-make-a-plan-each": ("self._plans.get(key)\n", "None\n", SELECTION),
            "plugin-launches-of-a-failed-kernel-stay": ("        self._launches.forget()\n", "", PLUGINS),
            "plugin-plans-of-a-failed-kernel-stay": ("self._plans.pop(key, None)", "continue", PLUGINS),
        },
        "dispatch/machine.py": {
            "plugin-a-failed-kernel-is-chosen-again": (
                "            self._exclude(dict.fromkeys(ids, why))\n",
                "",
                PLUGINS,
            ),
            "plugin-a-shortage-sets-it-aside": (
                "        if is_transient(error):\n            return\n",
                "",
                PLUGINS,
            ),
            "select-arrays-on-two-devices": ("places.values())) > 1", "places.values())) > 2", SELECTION),
        },
        "dispatch/select/fields.py": {
            "select-a-field-of-another-type-from-the-cache": (
                "kind, repr(value)",
                "",
                ["tests/dispatch/test_functional.py"],
            ),
            "select-a-multiple-of-a-size-is-the-size": ("extent // axis.factor", "extent", ARGUMENTS),
            "select-a-given-argument-decides-nothing": (
                "next(filter(fits, values), values[0])",
                "values[0]",
                ARGUMENTS,
            ),
        },
        "dispatch/select/measured.py": {
            "tuning-a-weaker-promise-is-chosen": (
                'f"promises less than the first of the ranking: {offered.short}" if offered.short else ""',
                '""',
                TUNING,
            ),
            "tuning-times-of-an-older-kernel-count": ("offered.source_hash !=", "not", TUNING),
            "tuning-a-gain-of-just-the-margin-counts": ("was, least) <=", "was, least) <", TUNING),
            "tuning-the-clock-decides-among-equals": (
                "pair[0].rank[0], pair[1], pair[0].rank[1]",
                "pair[1], pair[0].rank",
                TUNING,
            ),
            "tuning-times-of-another-card-count": ("(None, unlike) if unlike else _decide(", "_decide(", TUNING),
        },
        "dispatch/select/tuning.py": {
            "tuning-old-entries-win": (
                "{**self._by_problem, **other._by_problem}",
                "{**other._by_problem, **self._by_problem}",
                TUNING,
            ),
        },
        "dispatch/cuda/call.py": {
            "bind-a-read-only-output": (
                "in rules.WRITTEN and found.read_only",
                "not in rules.WRITTEN and found.read_only",
                BINDING,
            ),
            "bind-an-array-of-another-card": ("not in {self._ordinal, ANYWHERE}", "is None", BINDING),
            "bind-the-remembered-call-misses-an-overlap": ("low - one_high", "low", BINDING),
            "bind-different-streams-of-arrays": ("len(named) > 1", "len(named) > 2", BINDING),
            "bind-packed-outputs-have-whole-bytes": ("storage_shape(shape, argument.elements[0])", "shape", BINDING),
        },
        "dispatch/host/rules.py": {
            "bind-a-broadcast-output": (
                "max(span + place.itemsize, place.itemsize)",
                "span",
                BINDING,
            ),
            "bind-negative-strides-overlap-nothing": (
                "low += (extent",
                "high += (extent",
                BOUND,
            ),
            "bind-in-place-may-be-anything-that-begins-there": (
                "out == other",
                "out.address == other.address",
                BINDING,
            ),
            "bind-an-integer-that-wraps": (
                "is_whole or not low <= int(value) <= high",
                "is_whole",
                BOUND,
            ),
        },
        "dispatch/host/binding.py": {
            "bind-numbers-before-the-mode-is-checked": (
                "        require_exact_mode()  # before numbers are rounded\n",
                "",
                ["tests/dispatch/host/test_floating.py"],
            ),
        },
        "dispatch/host/arrays.py": {
            "bind-a-mask-is-dropped": (
                "np.ma.MaskedArray)",
                "np.ma.MaskedArray) and value.mask.any()",
                ["tests/dispatch/host/test_arrays.py"],
            ),
        },
        "dispatch/cuda/views.py": {
            "views-rows-of-columns-with-gaps": (
                "(not columns or columns[-1][1] == 1) and _chained(columns",
                "_chained(columns",
                BINDING,
            ),
            "views-the-shortest-rows": ("min(common))", "max(common))", BINDING),
            "views-packed-rows-that-begin-within-a-byte": ("not layout.packed or shape[-1] % 2 == 0", "True", BINDING),
        },
        "dispatch/cuda/packing.py": {
            "pack-parameters-are-not-aligned": (
                "lead + -(-(end - lead) // alignment) * alignment",
                "end",
                ["tests/dispatch/compile/test_compiling.py"],
            ),
            "pack-bf16-is-the-lower-half": (
                "number)))[0] >> 16",
                "number)))[0] & 0xFFFF",
                ["tests/dispatch/host/test_floating.py", "tests/dispatch/compile/test_compiling.py"],
            ),
        },
        "dispatch/cuda/streams.py": {
            "stream-of-another-card": ("and device !=", "and device <", BINDING),
            "stream-true-is-a-handle": ("int) and not isinstance(stream, bool)", "int)", BINDING),
        },
        "dispatch/cuda/scratch.py": {
            "scratch-is-shared-with-a-captured-graph": ("if handle and self._driver", "if not self._driver", BINDING),
            "scratch-of-one-stream-serves-all": ("_places.get(handle)", "_places.get(0)", BINDING),
            "scratch-of-the-parent-is-freed-in-a-child": (
                "if start.value and not inherited()",
                "if start.value",
                ["tests/dispatch/test_forks.py"],
            ),
            "scratch-of-a-graph-that-lives-is-given-to-another": (
                "is not None and each.destroyed()",
                "is not None",
                CAPTURES,
            ),
            "scratch-of-a-graph-that-is-destroyed-stays": (
                "owned = [self._owned.pop",
                "owned = [self._owned.get",
                CAPTURES,
            ),
            "scratch-of-torch-is-for-another-stream": (" or _TORCH.current_stream(ordinal)() != stream", "", CAPTURES),
        },
        "dispatch/cuda/launcher.py": {
            "scratch-of-torch-is-kept-by-an-error": ('lines.append("    held = None")', "pass", CAPTURES),
        },
        "dispatch/cuda/runner.py": {
            "launch-a-failure-is-repeated": ("== self._context", "is None", BINDING),
            "launch-outputs-for-another-stream": (
                "None if stream is None and not call.framework.borrows else handle",
                "None",
                BINDING,
            ),
        },
        "dispatch/compile/member.py": {
            "cubin-flags-are-not-in-the-key": ("[SCHEMA, *self]", "[SCHEMA, *self._replace(flags=())]", CACHE),
            "cubin-the-schema-is-not-in-the-key": ("[SCHEMA, *self]", "[*self]", CACHE),
            "cubin-a-torn-entry-is-believed": (
                "len(cubin) == self.size and hashlib.sha256(cubin).hexdigest() == self.sha256",
                "bool(cubin)",
                CACHE,
            ),
        },
        "dispatch/compile/provider.py": {
            "cubin-flags-of-the-launch-are-not-in-the-key": (
                "(*sku.flags, *launch.flags)",
                "sku.flags",
                ["tests/dispatch/compile"],
            ),
        },
        "dispatch/compile/sources.py": {
            "cubin-headers-are-not-in-the-key": (" *self.headers", "", ["tests/dispatch/compile/test_compiling.py"]),
        },
        "dispatch/compile/cache.py": {
            "cubin-damaged-facts-are-believed": (
                "hashlib.sha256(facts).hexdigest() != head[1].decode()",
                "not facts",
                CACHE,
            ),
            "cubin-an-entry-of-another-key": ("{member.key.digest}-", "{path.stem[:33]}", CACHE),
            "cubin-an-entry-that-others-can-write": (
                '            if shared(status):\n                return "others can write it"\n',
                "",
                CACHE,
            ),
            "cubin-entries-are-written-in-place": (
                "handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=_UNFINISHED)",
                "temporary = self._place(key, compiler)\n            handle = os.open(temporary, 65, 0o600)",
                CACHE,
            ),
            "cubin-processes-build-twice": ("held.enter_context(FileLock(", "str((", CACHE),
            "cubin-a-full-disk-loses-the-kernel": ("(OSError, InvalidRecord)", "InvalidRecord", CACHE),
        },
        "dispatch/compile/bundle.py": {
            "bundle-appended-bytes-are-accepted": ("!= status.st_size", "> status.st_size", BUNDLE),
            "bundle-others-may-write-it": (
                "            if not pinned:\n                _refuse_shared(path, status)\n",
                "",
                BUNDLE,
            ),
            "bundle-a-changed-cubin-is-run": ("not member.holds(cubin)", "len(cubin) != member.size", BUNDLE),
            "bundle-the-pin-is-not-compared": ("state.hexdigest() != pin.lower()", "not pin", BUNDLE),
            "bundle-of-other-keys": ("read.cubins !=", "read.cubins <", BUNDLE),
        },
        "dispatch/plugins/loading.py": {
            "plugin-is-validated-by-its-maker": (
                "kind.model_validate(record.model_dump(warnings=False)) != record",
                "not isinstance(record, kind)",
                PLUGINS,
            ),
        },
        "dispatch/plugins/asking.py": {
            "plugin-prints-on-standard-output": ("with kept_clean()", "if True", PLUGINS),
        },
        "dispatch/settings.py": {
            "settings-a-name-is-compared-as-it-is-written": (
                're.sub(r"[-_.]+", "-", name).lower(',
                "name.lower(",
                PLUGINS,
            ),
            "settings-nvtx-takes-anything": (
                '"0" | "1" as given:\n            return given == "1"',
                "given:\n            return bool(given)",
                TELEMETRY,
            ),
        },
        "dispatch/telemetry.py": {
            "telemetry-an-observer-stops-a-selection": (
                "Exception:  # noqa: BLE001  an observer may raise anything",
                "ValueError:",
                TELEMETRY,
            ),
            "telemetry-a-range-stays-open": (
                "try:\n            return self._runner.run(arrays, stream)\n        finally:\n            self._pop()",
                "result = self._runner.run(arrays, stream)\n        self._pop()\n        return result",
                TELEMETRY,
            ),
            "telemetry-lines-appear-twice": ("return\n            logger", "break\n            logger", TELEMETRY),
        },
        "dispatch/system/forks.py": {
            "system-a-fork-waits-for-no-import": (
                "os.register_at_fork(before=_await_imports, ",
                "os.register_at_fork(",
                ["tests/dispatch/test_forks.py"],
            ),
        },
        "dispatch/system/interrupts.py": {
            "system-ctrl-c-is-lost": (
                "        if came:",
                "        if not came:",
                ["tests/dispatch/test_interrupts.py"],
            ),
        },
        "dispatch/system/locks.py": {
            "system-a-fork-keeps-locks": ("in_child(", "(lambda *_: None)(", ["tests/dispatch/test_forks.py"]),
        },
        "dispatch/system/programs.py": {
            "system-an-interrupted-compiler-lives-on": (
                "os.killpg(",
                "os.getpgid and (lambda *_: None)(",
                ["tests/dispatch/system/test_programs.py"],
            ),
        },
        "dispatch/shard/explanation.py": {
            "shard-sums-may-leave-s32": ("k > longest:", "k > 2 * longest:", SHARDS),
        },
        "dispatch/shard/layer.py": {
            "shard-a-row-is-scaled-by-its-part": (
                "group.max(steps.amax(activation.data)",
                "steps.amax(activation.data",
                SHARDS,
            ),
            "shard-row-sums-of-one-rank": ("group.sum(steps.row_sums(codes.data)", "steps.row_sums(codes.data", SHARDS),
            "shard-a-chunk-has-the-scales-of-the-first": ("part[at] for", "part[: at.stop - at.start] for", SHARDS),
        },
        "dispatch/shard/group.py": {
            "group-sums-of-any-element": (
                "if s32 is not None and dtype != s32",
                "if s32 is not None and not dtype",
                ["tests/dispatch/shard/test_on_ranks.py"],
            ),
        },
        "dispatch/shard/shards.py": {
            "shard-sizes-need-not-add-up": ("sum(sizes) !=", "sum(sizes) >", SHARDS),
        },
        "dispatch/shard/plan.py": {
            "group-ranks-that-differ-go-on": ("compare(group, properties)\n        if", "if", SHARDS),
            "group-layers-in-another-order": ("        self._group.agree(self._call)\n", "", SHARDS),
        },
        "dispatch/shard/local.py": {
            "group-a-rank-that-died-is-waited-for": (
                "reason\n            self._changed.notify_all()",
                "reason",
                SHARDS,
            ),
        },
    }
)
