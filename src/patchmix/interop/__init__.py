"""Weights of other projects in, weights for other projects out."""
