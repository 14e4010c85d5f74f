"""Ironbatch, an LLM serving engine: continuous batching over paged KV blocks. docs/architecture.md is the way in."""

__version__ = "0.1.0"
