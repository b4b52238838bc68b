"""The frame of everything that measures: records, requirements, tables, and the course of a run."""
