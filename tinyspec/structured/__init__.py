"""Structured output: which tokens may follow, by a grammar and what is committed."""
