"""Attention, its compressors and its pools."""
