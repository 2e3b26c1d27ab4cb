"""Reading what `to_json` wrote: the same checks for plans and profiles, each with its own words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from .. import errors

T = TypeVar("T")


def read(text: str, version: int, build: Callable[[dict[str, Any]], T], refuse: Callable[[str], str]) -> T:
    """What a text says.

    Args:
        text: JSON, an object with its version.
        version: What can be read.
        build: Makes it from the object, without the version.
        refuse: The text of the error, from why.

    Raises:
        ArgumentError: The text is no JSON, of another version, or holds something else.
    """
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise errors.ArgumentError(refuse(f"no JSON: {error}")) from None
    if not isinstance(data, dict) or data.pop("version", None) != version:  # pyright: ignore[reportUnknownMemberType]
        raise errors.ArgumentError(refuse(f"this version of the library reads version {version}"))
    try:
        return build(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise errors.ArgumentError(refuse(f"a field is missing or unknown: {error}")) from None
