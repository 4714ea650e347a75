"""Linear layers and the embedding."""
