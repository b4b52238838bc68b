"""The report: one page, complete in one file, of what is registered, verified and measured."""
