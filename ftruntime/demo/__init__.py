"""Demo checkpoints in the official format, for trying the server and for tests: random ones of two
shapes, and a trained one that is part of the installation.
"""

from ftruntime.demo.make import copy_demo, make_demo

__all__ = ["copy_demo", "make_demo"]
