"""The life of a task: admit, run, log, fan out, recover. Knows neither A2A nor OpenCode."""
