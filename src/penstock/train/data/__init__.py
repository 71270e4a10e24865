"""From text on disk to batches."""
