"""Preparation of a run: its starting policy and its draft."""
