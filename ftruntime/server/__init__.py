"""The HTTP front: OpenAI to clients, typed messages to the engine process; no torch here."""
