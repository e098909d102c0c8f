"""The scripted model: an OpenAI-compatible server for demos and live tests."""
