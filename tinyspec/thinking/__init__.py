"""Thinking States: a model that reasons while it reads (arXiv 2602.08332)."""
