"""Settings that stand for a way to compute, found in the configuration by name."""

from __future__ import annotations

import dataclasses

from patchmix.config import Config, to_dict


def recompute_settings() -> list[str] | None:
    """What turns on recomputing activations in backward; None where there is no such thing."""
    sections = to_dict(Config())
    for section, values in sections.items():
        if isinstance(values, dict):
            for key, value in values.items():
                if key in ("recompute", "checkpoint_activations", "activation_checkpointing"):
                    return [f"{section}.{key}={'true' if isinstance(value, bool) else 1}"]
    return None


def has_setting(section: str, key: str) -> bool:
    part = getattr(Config(), section)
    return key in {field.name for field in dataclasses.fields(part)}
