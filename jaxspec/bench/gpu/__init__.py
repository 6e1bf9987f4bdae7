"""Measures speculation on an accelerator within ten minutes (`bench gpu`)."""
