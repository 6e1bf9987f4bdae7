"""Evaluation of policies on named sets of problems."""
