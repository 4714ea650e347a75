"""Experiments over HTTP against a running server, ours or another."""
