"""How well a checkpoint predicts a text and finds what stood far back in it, through the engine."""
