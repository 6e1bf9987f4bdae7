"""Typed and checked input of users."""
