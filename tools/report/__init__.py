"""The report: one self-contained page of what is registered, verified and measured."""
