"""The official checkpoint directory: expected tensors, index and headers, validated loading."""
