"""The engine: step loop, its process, messages to and from the HTTP front, executors."""
