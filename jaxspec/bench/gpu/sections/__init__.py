"""Sections of `bench gpu`: their programs and measurements."""
