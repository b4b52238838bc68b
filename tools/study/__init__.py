"""The frame of everything that measures: records, requirements, tables, plots, and the course of a run."""
