"""Kernels for DeepSeek-V4 on consumer cards: plain tensors in, plain tensors out."""

from ftkernels import backend  # first: fixes interpretation before any kernel is decorated
from ftkernels.backend import UnsupportedDeviceError

__version__ = "0.1.0"
__all__ = ["UnsupportedDeviceError", "__version__", "backend"]
