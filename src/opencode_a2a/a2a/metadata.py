"""Metadata that goes out with tasks and events: session, usage, progress, interrupts, errors.

``render`` puts it beside what A2A itself says; nobody needs it to read a task right.
"""

from dataclasses import asdict

from opencode_a2a.a2a.texts import moment
from opencode_a2a.events import (
    Interrupted,
    Json,
    JsonObject,
    Progressed,
    Question,
    Resumed,
    Usage,
    UsageCounted,
)
from opencode_a2a.tasks.state import Status, TaskRef


def known(**values: Json) -> JsonObject:
    """Return an object of what is known: absent values leave no key."""
    return {name: value for name, value in values.items() if value is not None}


def grouped(shared: JsonObject, opencode: JsonObject) -> JsonObject:
    return known(shared=shared or None, opencode=opencode or None)


def session(status: Status) -> JsonObject | None:
    if status.session_id is None:
        return None
    return known(id=status.session_id, title=status.title)


def usage(counted: UsageCounted | None) -> JsonObject | None:
    if counted is None:
        return None
    children = None if counted.children is None else _usage(counted.children)
    return _usage(counted.own) | known(children=children)


def _usage(used: Usage) -> JsonObject:
    return {
        "input_tokens": used.input,
        "output_tokens": used.output,
        "total_tokens": used.total,
        "reasoning_tokens": used.reasoning,
        "cache_tokens": {"read_tokens": used.cache_read, "write_tokens": used.cache_write},
        "cost": used.cost,
    }


def outcome(status: Status, ref: TaskRef) -> JsonObject:
    """Return what OpenCode said beyond A2A: why it failed or stopped, and how parts were fitted."""
    error = status.failure and known(
        type=status.failure.type, upstream_status=status.failure.upstream_status
    )
    return known(
        error=error,
        finish=status.finish,
        structured=status.structured,
        output_negotiation=negotiation(ref),
    )


def negotiation(ref: TaskRef) -> JsonObject | None:
    if ref.output_modes is None:
        return None
    return {"accepted_output_modes": [*ref.output_modes]}


def progress(event: Progressed) -> JsonObject:
    return known(**asdict(event))


def asked(event: Interrupted) -> JsonObject:
    tool = known(call_id=event.call_id, name=event.tool, input=event.tool_input) or None
    if event.type == "permission":
        details = known(
            permission=event.permission,
            patterns=[*event.patterns],
            always=[*event.always],
            metadata=event.metadata,
            tool=tool,
        )
    else:
        details = known(questions=[_question(one) for one in event.questions], tool=tool)
    return known(
        request_id=event.request_id,
        type=event.type,
        phase="asked",
        session_id=event.session_id,
        details=details,
        asked_at=None if event.asked_at is None else moment(event.asked_at),
        expires_at=None if event.expires_at is None else moment(event.expires_at),
        default=event.default,
    )


def resolved(event: Resumed) -> JsonObject:
    return known(
        request_id=event.request_id,
        type=event.type,
        phase="resolved",
        resolution=event.resolution,
        by=event.by,
        reason=event.reason,
    )


def _question(question: Question) -> JsonObject:
    return {
        "header": question.header,
        "question": question.question,
        "options": [
            {"label": option.label, "value": option.label, "description": option.description}
            for option in question.options
        ],
        "multiple": question.multiple,
        "custom": question.custom,
    }
