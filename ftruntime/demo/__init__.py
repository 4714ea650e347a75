"""A tiny random checkpoint in the official format, for trying the server and for tests."""

from ftruntime.demo.make import make_demo

__all__ = ["make_demo"]
