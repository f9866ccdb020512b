"""Faults on purpose: what is injected, how often, and what is lost. `make faults` prints the table."""
