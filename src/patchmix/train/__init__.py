"""The one training loop and what stands around it: schedules, optimiser, checkpoints, monitor, log."""
