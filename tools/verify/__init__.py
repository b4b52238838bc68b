"""Proofs: kernels against the definition, evidence, and the conformance kit."""
