"""What one does with a trained model."""
