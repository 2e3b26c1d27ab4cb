"""The words of the field, as attributes of models carry them: all that `structure.py` takes from names.

Queries, keys and values have one shape, and so have a router and any other small product; here names must tell. What
counts is the parts of a name (`q`, `proj`), not whole names, and never the name of a model.
"""

from __future__ import annotations

import re


def words(name: str) -> set[str]:
    """The words of an attribute's name: `linear_kv_up_proj`, `toQ`, `wkv_a`."""
    parts = re.split(r"[_.\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return {part[1:] if part in {"wq", "wk", "wv", "wkv", "wqkv"} else part for part in parts}


def feeds(name: str) -> set[str]:
    """Which of queries, keys and values a product with this name makes."""
    found = words(name)
    if name == "c_attn" or any("qkv" in word for word in found) or {"query", "key", "value"} <= found:
        return {"q", "k", "v"}
    long = {"query": "q", "key": "k", "value": "v"}
    letters = {long.get(word, word) for word in found}
    return (letters & {"q", "k", "v"}) | ({"k", "v"} if "kv" in letters else set())


def says_router(path: str) -> bool:
    """Whether a module on this path is called a router; a `gate_proj` is not one."""
    return any("router" in words(name) or name in {"gate", "wg", "gating"} for name in path.split("."))
