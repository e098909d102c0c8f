"""The JSON Schema of the settings file, for editors and for checks before a start.

Made from the declarations. ``load`` also takes a list or an object as text, and so does the schema.
What it accepts may still be refused, where settings contradict each other.
"""

from pydantic.json_schema import models_json_schema

from opencode_a2a.config.settings import GROUPS, SETTINGS
from opencode_a2a.events import JsonObject


def settings_schema() -> JsonObject:
    """Return the schema; the title of each key is its variable."""
    # What pydantic returns is JSON, but its types do not say so.
    _, made = models_json_schema([(group, "validation") for group in GROUPS.values()])
    kinds = {name: group.__name__ for name, group in GROUPS.items()}
    for setting in SETTINGS.values():
        fields = made["$defs"][kinds[setting.group]]["properties"]
        declared = fields[setting.field] | {"title": setting.variable}
        forms = declared.get("anyOf", [declared])
        if any(form.get("type") in ("array", "object") or "items" in form for form in forms):
            kept = {key: declared.pop(key) for key in ("title", "description")}
            declared = kept | {"anyOf": [declared, {"type": "string"}]}
        fields[setting.field] = declared
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The settings file of opencode-a2a",
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/{kind}"} for name, kind in kinds.items()},
        "additionalProperties": False,
        "$defs": made["$defs"],
    }
