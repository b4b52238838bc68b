"""Faults in the registry and in the references: records, constraints, guarantees, and what an op means."""

from faults.fault import listed

REGISTRY = ["tests/registry/test_registry.py"]
ARGUMENTS = ["tests/registry/test_argument.py"]
SELECTION = ["tests/dispatch/select/test_selection.py"]
NUMERICS = ["tests/kernels/test_numerics.py", "tests/kernels/test_properties.py"]
FAULTS = listed(
    {
        "registry/argument.py": {
            "argument-the-last-declaration-counts": (
                "found.setdefault(each.name, each)",
                "found[each.name] = each",
                ARGUMENTS,
            ),
            "argument-a-multiple-is-the-field": ("factor * getattr(", "getattr(", ARGUMENTS),
            "argument-a-condition-on-nothing": ("if name not in kinds:", "if not name:", ARGUMENTS),
        },
        "registry/arch.py": {
            "registry-a-family-is-a-floor": (
                "capability[0] == own[0] and capability",
                "capability",
                [*REGISTRY, *SELECTION],
            ),
            "registry-a-chip-runs-what-is-for-an-earlier-one": (
                "capability ==",
                "capability >=",
                [*REGISTRY, *SELECTION],
            ),
        },
        "registry/constraints.py": {
            "registry-a-minimum-excludes-itself": ("low <= value", "low < value", REGISTRY),
            "registry-a-product-excludes-its-bound": ("<= self.maximum", "< self.maximum", REGISTRY),
            "registry-a-divisor-is-ignored": ("% self.divisor == 0", ">= self.divisor", REGISTRY),
        },
        "registry/registry.py": {
            "registry-references-do-not-rank-last": (
                "sorted(self._skus.values(), key=self.is_reference",
                "self._skus.values(",
                [*REGISTRY, "tests/dispatch/plugins/test_plugins.py"],
            ),
            "registry-register-changes-the-old-snapshot": ("dict(self._skus)", "self._skus", REGISTRY),
            "registry-the-digest-leaves-out-backends": (
                "(*self._backends.values(), *self._skus.values()",
                "self._skus.values(",
                REGISTRY,
            ),
        },
        "registry/guarantee.py": {
            "registry-a-promise-beyond-the-backend": ("< ceiling.max_ulp", "> ceiling.max_ulp", REGISTRY),
            "registry-a-weaker-promise-meets-a-requirement": (
                "not None and given.max_ulp",
                "None or given.max_ulp",
                [*REGISTRY, *SELECTION],
            ),
        },
        "registry/sku.py": {
            "registry-an-id-without-the-second-element": (" self.aux_element)", ")", REGISTRY),
            "registry-a-workspace-adds-its-factors": ("* math.prod(", "* sum(", SELECTION),
        },
        "registry/value.py": {
            "registry-a-copied-record-is-not-validated": (
                "type(self).model_validate({**fields, **(update or {})}",
                "super().model_copy(update=update",
                REGISTRY,
            ),
        },
        "kernels/quantize/affine.py": {
            "reference-ties-away-from-zero": (
                "np.rint(np.divide(x, scale",
                "np.floor(np.divide(x, scale) + x.dtype.type(0.5",
                NUMERICS,
            ),
            "reference-nan-is-not-real-zero": ("t[np.isnan(t)] = 0", "t[np.isnan(t)] = q_min", NUMERICS),
            "reference-the-mask-excludes-its-upper-bound": ("<= q_max - z", "< q_max - z", NUMERICS),
            "reference-a-range-without-zero": ("np.clip(q_min", "np.clip(q_max", NUMERICS),
        },
        "kernels/quantize/fake_quantize_backward.py": {
            "reference-a-gradient-is-divided-twice": ("divide=False", "divide=True", NUMERICS),
        },
        "kernels/quantize/dynamic_range.py": {
            "reference-a-scale-per-the-other-axis": ("1 - (problem.axis", "(problem.axis", NUMERICS),
        },
        "kernels/linear/epilogue.py": {
            "reference-sums-beyond-24-bits": (
                "problem.weight_code, 1 << 24",
                "problem.weight_code, 1 << 28",
                ["tests/kernels/test_numerics_linear.py"],
            ),
            "reference-relu-loses-nan": (
                "value[value <= 0]",
                "value[~(value > 0)]",
                ["tests/kernels/test_numerics_linear.py"],
            ),
        },
    }
)
