"""Drafters: who proposes tokens for a verify."""
