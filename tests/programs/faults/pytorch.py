"""Faults in `skuda.torch`: gradients, calibration, fusing, checkpoints, parallel layers, training."""

from faults.fault import listed

AUTOGRAD = ["tests/pytorch/test_autograd.py"]
TRAINING = ["tests/pytorch/test_training.py"]
CALIBRATION = ["tests/pytorch/test_calibration.py"]
SMOOTHING = ["tests/pytorch/test_smoothing.py"]
CHECKPOINT = ["tests/pytorch/test_checkpoint.py"]
FUSE = ["tests/pytorch/test_fuse.py", "tests/pytorch/test_fuse_names.py", "tests/pytorch/test_fuse_renamed.py"]
GRAPH = ["tests/pytorch/test_fuse_graph.py"]
PARALLEL = ["tests/pytorch/test_parallel.py", "tests/pytorch/test_torch_group.py"]
NONFINITE = ["tests/pytorch/test_nonfinite.py"]
WEIGHT = ["tests/pytorch/test_dequantized_weight.py"]
MODULES = ["tests/pytorch/test_module_calls.py", "tests/pytorch/test_module_state.py"]
ATTENTION = ["tests/pytorch/test_attention_transformers.py"]
KV_CACHE = ["tests/pytorch/test_kv_cache.py"]
EXACT = ["tests/pytorch/test_exact.py"]
CERTIFY = ["tests/pytorch/test_certification.py"]
CONFIG_FIRST = "config = stack.enter_context(replacing(folder / CONFIG))"
TENSORS_FIRST = "file = stack.enter_context(replacing(folder / TENSORS))"
FAULTS = listed(
    {
        "dispatch/torch/autograd.py": {
            "torch-the-slope-of-a-scale-is-inverted": (
                "codes - steps, codes.clamp(-Q_MAX, Q_MAX)",
                "codes.clamp(-Q_MAX, Q_MAX), codes - steps",
                AUTOGRAD,
            ),
            "torch-the-mask-counts-steps-not-codes": ("codes.abs() <=", "steps.abs() <=", AUTOGRAD),
            "torch-a-nan-spoils-the-scale-of-all": ("torch.where(steps.isnan(), 0.0, slope)", "slope", AUTOGRAD),
            "torch-a-second-derivative-is-zero": (
                "torch.compiler.is_compiling() or not torch.is_grad_enabled()",
                "True",
                AUTOGRAD,
            ),
            "torch-the-gradient-of-a-frozen-input-has-no-scale": (
                "scale.to(_compute(dtype",
                "torch.ones_like(scale.to(_compute(dtype)",
                AUTOGRAD,
            ),
            "train-a-nan-in-a-row-is-hidden": ("torch.nan, scale", "1.0, scale", TRAINING),
            "train-a-nan-in-an-input-is-hidden": ('"nonfinite": "propagate"}', '"nonfinite": None}', TRAINING),
            "train-a-nan-with-a-fixed-scale-is-hidden": (" + (input - input)", "", [*AUTOGRAD, *TRAINING]),
            "torch-a-bias-gets-one-row": ("grad).sum(0).to(dtype", "grad)[0].to(dtype", [*AUTOGRAD, *TRAINING]),
        },
        "dispatch/torch/training.py": {
            "train-an-export-loses-gradients": (
                "torch.compiler.is_exporting() and torch.is_grad_enabled()",
                "False",
                TRAINING,
            ),
            "train-observed-ranges-shrink": (
                "torch.fmax(self.input_scale, largest / torch.full_like(largest, Q_MAX)",
                "(largest / torch.full_like(largest, Q_MAX)).reshape(1",
                TRAINING,
            ),
        },
        "dispatch/torch/derivatives.py": {
            "torch-a-tangent-is-lost": (" and not forward_mode", "", AUTOGRAD),
            "torch-a-gradient-of-torch-func-is-lost": ("if given.requires_grad", "if False", AUTOGRAD),
        },
        "dispatch/torch/nonfinite.py": {
            "propagate-nothing": ("    layer.propagating()\n", "", NONFINITE),
        },
        "dispatch/torch/digest.py": {
            "parallel-a-digest-without-places": (") + 1", ") * 0 + 1", PARALLEL),
            "parallel-a-digest-without-the-end": ("*rest.tolist()", "len(rest)", PARALLEL),
        },
        "dispatch/torch/parallelize.py": {
            "parallel-ranks-do-not-compare-weights": ("    _compare_weights(model, ranks)\n", "", PARALLEL),
            "parallel-heads-begin-within-a-block": ('packed.fits("k", sizes)', "True", PARALLEL),
        },
        "dispatch/torch/calibration.py": {
            "calibrate-the-last-batch-wins": (
                "batch if before is None else torch.maximum(before, batch.to(before.device))",
                "batch",
                CALIBRATION,
            ),
            "calibrate-nan-is-a-maximum": (").nan_to_num(nan=0.0, posinf=torch.inf).amax(0", ").amax(0", CALIBRATION),
            "calibrate-first-rows-only": (
                "np.where(count < self._rows, count, self._generator.integers(0, count + 1))",
                "count",
                CALIBRATION,
            ),
            "calibrate-a-norm-with-another-user": (
                "tensor)) is not None",
                "tensor)) is not None and not self._layers",
                CALIBRATION,
            ),
            "calibrate-hooks-stay": (
                "stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove",
                "layer.register_forward_pre_hook(hook, with_kwargs=True",
                CALIBRATION,
            ),
        },
        "dispatch/torch/smoothing.py": {
            "smooth-the-weight-is-divided-too": ("weight.float() *", "weight.float() /", SMOOTHING),
            "smooth-folded-layers-divide-again": (
                "                for layer in layers:\n                    layer.take_smooth()\n",
                "",
                SMOOTHING,
            ),
            "smooth-a-norm-of-one-plus-weight": (
                "Tensor) and torch.equal(plain * powers, folded)",
                "Tensor)",
                SMOOTHING,
            ),
            "smooth-layers-of-one-norm-have-own-factors": (
                "_largest([_column_maxima(linear.weight) for linear in linears.values()]",
                "_column_maxima(next(iter(linears.values())).weight",
                SMOOTHING,
            ),
        },
        "dispatch/torch/fuse.py": {
            "fuse-a-curve-for-another": ('{"approximation": "tanh"}', '{"approximation": "erf"}', FUSE),
            "fuse-layers-with-and-without-bias": ("if any((a is", "if all((a is", FUSE),
            "fuse-an-unproven-mlp": (
                "next(filter(None, (form.fullmatch(expression)",
                "next(filter(None, (form.search(expression)",
                FUSE,
            ),
            "fuse-another-eps-of-a-norm": (
                'raise NotProven(f"{name} normalizes more than one axis, or its eps is torch\'s default")',
                "norm.eps = 1e-6",
                FUSE,
            ),
        },
        "dispatch/torch/fused_modules.py": {
            "fuse-a-hook-is-not-seen": ("        if any(hooks):", "        if False:", FUSE),
            "fuse-a-child-is-not-compared": ("if modules[name] is not child", "if name not in modules", FUSE),
            "fuse-gradients-of-other-bits": (
                "given = gate_up.detach() if recorded",
                "given = 2 * gate_up if recorded",
                FUSE,
            ),
        },
        "dispatch/torch/graph.py": {
            "graph-codes-of-what-is-used-elsewhere": ("if user not in known]", "if False]", GRAPH),
            "graph-another-range-of-codes": ("not in ((None, None), (-Q_MAX, Q_MAX))", "== 0", GRAPH),
        },
        "dispatch/torch/patterns.py": {
            "graph-a-norm-of-another-tensor": ("fits = _uncast(given) is want", "fits = True", GRAPH),
            "graph-a-mean-over-another-axis": ("and axes in ([-1], [", "and axes in ([-1], [-2], [", GRAPH),
        },
        "dispatch/torch/source.py": {
            "fuse-a-call-of-its-own": ("return known or call is nn.Module.__call__", "return True", FUSE),
            "fuse-a-forward-of-another": ('vars(module).get("forward", own) != own or', "", FUSE),
        },
        "dispatch/torch/joined.py": {
            "fuse-parts-are-shifted-by-one": (
                "joined.sizes)][number : number",
                "joined.sizes)][max(number - 1, 0) : max(number - 1, 0)",
                FUSE,
            ),
        },
        "dispatch/torch/scheme.py": {
            "checkpoint-a-prefix-of-a-name": ("target == name", "name.startswith(target)", CHECKPOINT),
            "checkpoint-a-field-that-nobody-knows": (
                "for name in self.names",
                "for name in self.names[:0]",
                CHECKPOINT,
            ),
        },
        "dispatch/torch/checkpoint.py": {
            "checkpoint-the-config-before-the-tensors": (
                f"{CONFIG_FIRST}\n        {TENSORS_FIRST}",
                f"{TENSORS_FIRST}\n        {CONFIG_FIRST}",
                CHECKPOINT,
            ),
            "checkpoint-left-over-tensors": ("        tensors.finish()\n", "", CHECKPOINT),
            "checkpoint-a-tied-tensor-with-two-values": (
                "torch.equal(_bytes(other), _bytes(first))",
                "other.shape == first.shape",
                CHECKPOINT,
            ),
        },
        "dispatch/torch/stored.py": {
            "checkpoint-other-zero-points-of-a-symmetric-layer": ("zeros.any())", "zeros.all())", CHECKPOINT),
        },
        "dispatch/torch/int8_linear.py": {
            "propagate-by-column": (".sum(-1, keepdim=True)", ".sum(0, keepdim=True)[..., :1]", NONFINITE),
            "module-a-cast-changes-scales": ("_is_scale(name)", "not _is_scale(name)", MODULES),
        },
        "dispatch/torch/dequantized_weight.py": {
            "weight-views-are-written": ("lambda view: cls((view,), view.dtype, owner)", "lambda view: view", WEIGHT),
            "weight-without-the-divisors-of-the-input": ("*(() if smooth is None else (smooth,))", "", WEIGHT),
            "weight-codes-from-any-numbers": ("or torch.equal(rounded.to(held.dtype), held)", "or True", WEIGHT),
        },
        "dispatch/torch/tensor_op.py": {
            "module-a-launch-hides-from-a-mode": ("function_modes() or dispatch_modes() or ", "", MODULES),
            "module-a-launch-records-no-gradient": (
                'unless = f"{unless} or records_gradients()"',
                "pass",
                ["tests/pytorch/test_tensor_ops.py"],
            ),
            "module-a-copy-serves-the-next-call": (
                "        if copied:",
                "        if False:",
                ["tests/pytorch/test_tensor_ops.py"],
            ),
        },
        "dispatch/torch/sharded_linear.py": {
            "parallel-a-bias-on-every-rank": ('bias, "n", cut, group.rank', 'bias, "n", cut, 0', PARALLEL),
            "parallel-smoothing-of-other-columns": ("group.rank).clone(", "0).clone(", PARALLEL),
            "parallel-ranks-do-not-compare-inputs": ("digest(given.data, given.scale)", "", PARALLEL),
            "parallel-channel-sums-of-bytes": ("torch.int32)", "torch.int8).int()", PARALLEL),
            "parallel-joined-layers-are-cut-as-one": (
                "pieces = tensor.split(_lengths(tensor, axis, tuple(map(sum, parts)))",
                "pieces, parts = (tensor,), (tuple(map(sum, zip(*parts, strict=True))),",
                ["tests/pytorch/test_parallel.py", "tests/pytorch/test_fuse.py", "tests/pytorch/test_transformers.py"],
            ),
        },
        "dispatch/torch/sequences.py": {
            "attention-beams-do-not-copy-the-last-page": ("begun[own] & ~keeps", "begun[own] & False", KV_CACHE),
            "attention-a-full-cache-is-written": ("self.seen + new <= self.most", "self.seen <= self.most", KV_CACHE),
            "attention-pages-grow-one-by-one": (
                "max(blocks, min(self.blocks + self.blocks // 2, MOST_POSITIONS // PAGE))",
                "blocks",
                KV_CACHE,
            ),
            "attention-positions-of-rope-are-not-checked": ("(ids == at)", "(at == at)", ATTENTION),
        },
        "dispatch/torch/kv_cache.py": {
            "attention-a-crop-leaves-shared-pages": (
                "self.sequences.crop(-tokens_to_remove)\n            self._own_pages()",
                "self.sequences.crop(-tokens_to_remove)",
                KV_CACHE,
            ),
            "attention-a-window-is-forgotten": (
                'fields | ({} if window is None else {"window": window})',
                "fields",
                ATTENTION,
            ),
        },
        "dispatch/torch/attention.py": {
            "attention-padding-to-the-left-has-positions": (
                "torch.where(before > 0, before, -leading)",
                "before",
                [*ATTENTION, *KV_CACHE],
            ),
            "attention-rows-of-an-encoder-stay-moved": ("order.argsort(1), 1), None", "order, 1), None", ATTENTION),
            "attention-the-window-of-the-config-is-not-compared": (
                "    _check_window(module, config, window)\n",
                "",
                ATTENTION,
            ),
        },
        "dispatch/torch/rope_attention.py": {
            "attention-a-rope-that-changes-is-a-table": ("not in _FIXED", "in ()", ATTENTION),
        },
        "dispatch/torch/exact_modules.py": {
            "exact-padding-is-seen-in-training": (
                "seen = token[:, None, :] & (ahead >= 0)",
                "seen = (ahead >= 0) & (ahead == ahead)",
                EXACT,
            ),
            "exact-a-gradient-without-rope": (
                "q, k = (each * cos + _half_turned(each) * sin for each in (q, k))",
                "q, k = (each * 1 for each in (q, k))",
                EXACT,
            ),
        },
        "dispatch/torch/certification.py": {
            "certify-bits-are-not-compared": (
                "unequal = values.view(torch.int32) != other.view(torch.int32)",
                "unequal = torch.zeros(values.shape, dtype=torch.bool)",
                CERTIFY,
            ),
        },
        "dispatch/torch/group.py": {
            "parallel-ranks-do-not-compare-calls": ("digest).any(", "digest).all(", PARALLEL),
            "parallel-uneven-rows-are-not-padded": ("tensor[span(sizes, rank)]", "tensor[:rows]", PARALLEL),
        },
    }
)
