"""Paged attention and other stand-ins in a loaded model, and the way back."""
