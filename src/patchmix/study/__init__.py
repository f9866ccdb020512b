"""Cost and comparison: FLOPs, tables beside the paper's, ablations."""
