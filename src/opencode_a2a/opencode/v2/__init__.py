"""The driver of OpenCode 2: its wire as the values that the rest of the service knows."""
