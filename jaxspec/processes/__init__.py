"""Processes of a job: how they meet and end, and which devices and rows they have."""
