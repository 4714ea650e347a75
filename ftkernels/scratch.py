"""How every scratch tensor begins: it bounds launches, and so is code that entries follow from."""

COUNTER_BYTES = 64 * 1024
"""Head of every scratch tensor: counters, zero before and after each op."""
