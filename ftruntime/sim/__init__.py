"""The real scheduler under a virtual clock, with step costs as data. No torch."""
