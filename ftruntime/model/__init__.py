"""DeepSeek-V4 as a module tree over ftkernels ops, and its shape as data."""
