"""Attention: the op contract, the metadata, and the backends (one file each in `backends/`)."""

from rung.attention.base import (
    PAD_SLOT,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    BatchBounds,
    CaptureSupport,
    HostMetadata,
    KVCache,
)
from rung.attention.launch_keys import AttentionCall, LaunchKeys
from rung.attention.layer import SPLIT_OPS, Attention, attention_layers
from rung.attention.rotation import Rotation, rotate

__all__ = [
    "PAD_SLOT",
    "SPLIT_OPS",
    "Attention",
    "AttentionBackend",
    "AttentionCall",
    "AttentionMetadata",
    "AttentionSpec",
    "BatchBounds",
    "CaptureSupport",
    "HostMetadata",
    "KVCache",
    "LaunchKeys",
    "Rotation",
    "attention_layers",
    "rotate",
]
