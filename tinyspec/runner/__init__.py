"""Passes through a patched model: batches, the KV pool, logits and sampling."""
