"""JSON of a model, whatever the paths in it hold."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel


def json_text(model: "BaseModel", indent: int | None = None) -> str:
    """``model`` as JSON by its aliases; in ASCII where a path in it is no text, as the name of a file need not be."""
    from pydantic_core import PydanticSerializationError

    try:
        return model.model_dump_json(by_alias=True, indent=indent)
    except PydanticSerializationError:
        return json.dumps(model.model_dump(mode="json", by_alias=True), indent=indent)
