"""Passes through a served model: batches, the KV pool, logits and sampling."""
