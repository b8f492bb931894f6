"""Sections 5.2 to 5.4: schedule, loss, and the run."""
