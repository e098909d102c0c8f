"""Metadata that goes out with tasks and events: session, usage, progress, interrupts, errors.

``render`` puts it beside what A2A itself says; nobody needs it to read a task right.
"""

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
from opencode_a2a.protocol.prompts import moment
from opencode_a2a.tasks.lifecycle import Status, TaskRef


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
    told = _usage(counted.own)
    if counted.children is not None:
        told["children"] = _usage(counted.children)
    return told


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
    return known(
        type=event.type,
        status=event.status,
        part_id=event.part_id,
        title=event.title,
        subtitle=event.subtitle,
        reason=event.reason,
        todos=None if event.todos is None else [*event.todos],
    )


def asked(event: Interrupted) -> JsonObject:
    return known(
        request_id=event.request_id,
        type=event.type,
        phase="asked",
        session_id=event.session_id,
        details=_permission(event) if event.type == "permission" else _questions(event),
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


def _permission(event: Interrupted) -> JsonObject:
    return known(
        permission=event.permission,
        patterns=[*event.patterns],
        always=[*event.always],
        metadata=event.metadata,
        tool=_tool(event),
    )


def _questions(event: Interrupted) -> JsonObject:
    questions: list[Json] = [_question(question) for question in event.questions]
    return known(questions=questions, tool=_tool(event))


def _question(question: Question) -> JsonObject:
    options: list[Json] = [
        {"label": option.label, "value": option.label, "description": option.description}
        for option in question.options
    ]
    return {
        "header": question.header,
        "question": question.question,
        "options": options,
        "multiple": question.multiple,
        "custom": question.custom,
    }


def _tool(event: Interrupted) -> JsonObject | None:
    return known(call_id=event.call_id, name=event.tool, input=event.tool_input) or None
