"""Traces for OpenTelemetry: what the log of a task says, as spans.

``names`` pins the conventions, ``spans`` folds a log into spans, ``export`` hands them to the SDK,
and ``tracing`` is what ``app`` connects with the tasks. Only ``app`` imports this package, and only
if the setting says so; without it the service works, and imports nothing of OpenTelemetry.
"""

from opencode_a2a.otel.tracing import Tracing as Tracing
