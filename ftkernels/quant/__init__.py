"""Number formats: FP8, FP4, their scales and rotations."""
