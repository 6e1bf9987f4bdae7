"""Processes of a job: their meeting, end, devices and rows."""
