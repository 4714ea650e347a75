"""Routing and experts."""
