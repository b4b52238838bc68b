"""Locks across forks, files that others may change, and child processes."""
