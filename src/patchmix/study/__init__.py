"""Cost and comparison: FLOPs, tables next to the paper's, ablations."""
