"""Choices among configurations as a file: recorded on a device, shipped, given to builds for such devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rung.cache import Store
from rung.errors import ConfigError
from rung.launch.choices import KIND, choice_entry

FORMAT = 1


def tuning_of(store: Store) -> dict[str, Any]:
    """Every choice of a store as JSON: device, hashes of the machine code that could run and of the one that does, measured times."""
    found = [
        {**manifest.factors, "code": manifest.data["code"], "microseconds": manifest.data["microseconds"]}
        for _, manifest in store.manifests(KIND)
    ]
    return {"format": FORMAT, "choices": sorted(found, key=lambda choice: (choice["device"], choice["codes"]))}


def read_tuning(text: str, name: str) -> list[Mapping[str, Any]]:
    """The choices of a file. Raises `ConfigError` for what is none; `name` is how the user calls it."""
    try:
        data = json.loads(text)
        choices = data["choices"]
        fine = data["format"] == FORMAT and all(
            isinstance(one["device"], str) and one["code"] in one["codes"] and isinstance(one["microseconds"], list) for one in choices
        )
    except (ValueError, KeyError, TypeError):
        fine = False
    if not fine:
        raise ConfigError(f"{name} is no tuning file of format {FORMAT}", hint="make it with `rung cache tuning`")
    found: list[Mapping[str, Any]] = choices
    return found


def keep_tuning(store: Store, choices: list[Mapping[str, Any]], device_name: str) -> int:
    """Keep the choices of one device in the store; returns how many. Raises `CacheError` when the disk refuses."""
    ours = [choice for choice in choices if choice["device"] == device_name]
    for choice in ours:
        store.put(choice_entry(choice["codes"], device_name, choice["code"], choice["microseconds"]))
    return len(ours)
