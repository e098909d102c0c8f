"""The life of a task: admit, run, cancel, recover. Knows neither A2A nor OpenCode."""
