"""Mid-training: state, optimizer, step, loop, checkpoints, metrics."""
