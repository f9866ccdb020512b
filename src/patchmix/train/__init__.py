"""The one training loop and what it needs: checkpoints, log, clock, signals, memory."""
