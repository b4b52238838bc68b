"""Sources, compilers, cubins, the cubin cache and bundles."""
