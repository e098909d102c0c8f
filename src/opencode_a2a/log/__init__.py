"""The log of a task: its entries, their readers, and the state that they add up to.

``state`` folds entries into a task and has their stored form, and ``stored`` reads it. ``log`` is
the log of a task that this process runs, with its readers and its writer; ``remote`` that of a task
that another replica runs. ``seen`` keeps what readers were shown. Knows neither A2A nor OpenCode.
"""
