"""Slow, obviously right versions, written straight from the paper."""
